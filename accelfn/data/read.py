# SPDX-License-Identifier: Apache-2.0
"""Reading: portions into batches, in this process or in others that read ahead."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import attrs
import numpy as np
import torch
from torch.utils.data import DataLoader

from accelfn.data.batch import Batch, Filler
from accelfn.data.cut import Span
from accelfn.data.epoch import Portion
from accelfn.data.fetch import Fetch, Task
from accelfn.errors import DataError

Pair: TypeAlias = tuple[Portion, list[Any]]
"""What was to be read, and the values of its micro-batches."""


def tasks_of(portion: Portion) -> list[Task]:
    """Return what is to be read, a micro-batch each."""
    last = (
        portion.start.samples + portion.num_samples - 1
    )  # a stand-in is within the batch
    return [
        Task(portion.key, min(begin, last), indices)
        for (begin, _), indices in zip(portion.spans, portion.indices, strict=True)
    ]


def read_here(portions: Iterable[Portion], fetch: Fetch) -> Iterator[Pair]:
    """Read in this process, as each is asked for."""
    for portion in portions:
        yield portion, [fetch(task) for task in tasks_of(portion)]


@attrs.frozen
class Place:
    """Where reading happens, for errors: a rank, and the update that the first batch is for."""

    rank: int
    size: int
    update: int


def read_ahead(
    portions: Iterator[Portion],
    fetch: Fetch,
    *,
    num_workers: int,
    timeout: float,
    place: Place,
) -> Iterator[Pair]:
    """Read in other processes, by torch's DataLoader, a micro-batch a task.

    Raises:
        DataError: a process was killed or did not answer; what it was to read is named.
    """
    sent: deque[Portion] = deque()

    def to_workers() -> Iterator[Task]:
        for portion in portions:
            sent.append(portion)
            yield from tasks_of(portion)

    def received() -> Iterator[Pair]:
        values: list[Any] = []
        for value in _loader(
            _Fetched(fetch), num_workers, timeout, sampler=to_workers()
        ):
            values.append(value)
            if len(values) == len(sent[0].spans):
                yield sent.popleft(), values
                values = []

    return _explained(received(), place, timeout, lambda: _in_flight(sent))


def in_workers(
    share: Any, *, num_workers: int, timeout: float, place: Place
) -> Iterator[Pair]:
    """Read a stream in other processes, an update a turn.

    Raises:
        DataError: a process was killed or did not answer.
    """
    return _explained(
        iter(_loader(share, num_workers, timeout)), place, timeout, lambda: ""
    )


def _loader(
    dataset: Any, num_workers: int, timeout: float, sampler: Any = None
) -> "DataLoader[Any]":
    return DataLoader(
        dataset,
        batch_size=None,
        sampler=sampler,
        num_workers=num_workers,
        collate_fn=_as_is,
        timeout=timeout,
        # DataLoader draws a base seed from the global generator unless it has its own
        generator=torch.Generator().manual_seed(0),
    )


def _explained(
    pairs: Iterator[Pair],
    place: Place,
    timeout: float,
    in_flight: Callable[[], str],
) -> Iterator[Pair]:
    """Yield what workers read; if one ends or hangs, say what was being read."""
    num_read = 0
    try:
        for pair in pairs:
            yield pair
            num_read += 1
    except RuntimeError as error:
        said = str(error)
        if "DataLoader timed out" in said:
            said = f"it gave nothing for {timeout:g} s, its timeout."
        elif "DataLoader worker" not in said:  # what a dataset raised is its own
            raise
        msg = (
            f"A data worker of rank {place.rank} of {place.size} failed while the batch of"
            f" update {place.update + num_read} was due: {said}\n{in_flight()}".rstrip()
        )
        raise DataError(msg) from error


def _in_flight(sent: Iterable[Portion]) -> str:
    rows = [indices.tolist() for portion in sent for indices in portion.indices]
    listed = [
        f"  {row}" if len(row) <= 8 else f"  [{str(row[:8])[1:-1]}, ...]"
        for row in rows
    ]
    return "Being read were the samples at these dataset indices:\n" + "\n".join(
        listed[:8]
    )


class _Fetched:
    """A dataset whose index is a task and whose sample is a micro-batch."""

    def __init__(self, fetch: Fetch) -> None:
        self.fetch = fetch

    def __getitem__(self, task: Task) -> Any:
        return self.fetch(task)


def _as_is(value: Any) -> Any:
    return value


def assembled(pairs: Iterable[Pair]) -> Iterator[Batch]:
    """Yield batches of what was read."""
    for portion, values in pairs:
        spans = portion.spans
        yield Batch(
            micro_batches=tuple(values),
            weights=tuple([high - low for low, high in spans]),
            start=portion.start,
            cursor=portion.after,
            num_samples=portion.num_samples,
            parts_indices=portion.indices,
            parts_filler=tuple([filler(span, portion.own) for span in spans]),
        )


def filler(span: Span, num_samples: int) -> Filler:
    """Return which samples of a micro-batch are filler: a stand-in, or beyond the epoch."""
    low, high = span
    if high == low:
        return True
    if high <= num_samples:
        return False
    return np.arange(low, high) >= num_samples
