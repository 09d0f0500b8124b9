# SPDX-License-Identifier: Apache-2.0
"""Readers: portions into batches, in this process or in others that read ahead."""

from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils.data import DataLoader

from accelfn.data.batch import Batch, Filler
from accelfn.data.cursor import Cursor
from accelfn.data.epoch import Portion
from accelfn.data.fetch import Fetch, Task, nothing
from accelfn.data.plan import Plan
from accelfn.data.sources import shown
from accelfn.data.workers import Place, nothing_said, start_method, watched

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
    if fetch.is_pure:
        gather = fetch.source.batch
        for portion in portions:
            yield portion, [gather(indices, nothing) for indices in portion.indices]
        return
    for portion in portions:
        yield portion, [fetch(task) for task in tasks_of(portion)]


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
    num_read, values = 0, list[Any]()

    def to_workers() -> Iterator[Task]:
        for portion in portions:
            sent.append(portion)
            yield from tasks_of(portion)

    def due() -> tuple[int, str]:
        return num_read, _in_flight(sent)

    loader = _loader(_Fetched(fetch), num_workers, timeout, sampler=to_workers())
    for value in watched(loader, timeout=timeout, place=place, due=due):
        values.append(value)
        if len(values) == len(sent[0].spans):
            num_read += 1
            yield sent.popleft(), values
            values = []


def in_workers(
    share: Any, start: Cursor, *, num_workers: int, timeout: float, place: Place
) -> Iterator[Pair]:
    """Read a stream in other processes, an update a turn.

    Raises:
        DataError: a process was killed or did not answer.
    """
    num_read, after = 0, start

    def due() -> tuple[int, str]:
        where = f"sample {after.samples} of epoch {after.epoch}"
        return num_read, f"Being read was the stream from {where} on."

    loader = _loader(share, num_workers, timeout)
    for portion, values in watched(loader, timeout=timeout, place=place, due=due):
        num_read, after = num_read + 1, portion.after
        yield portion, values


def _loader(
    dataset: Any, num_workers: int, timeout: float, sampler: Any = None
) -> "DataLoader[Any]":
    with nothing_said():
        return DataLoader(
            dataset,
            batch_size=None,
            sampler=sampler,
            num_workers=num_workers,
            collate_fn=_as_is,
            timeout=timeout,
            multiprocessing_context=start_method(num_workers),
            # DataLoader draws a base seed from the global generator unless it has its own
            generator=torch.Generator().manual_seed(0),
        )


def _in_flight(sent: Iterable[Portion]) -> str:
    rows = [indices for portion in sent for indices in portion.indices]
    listed = "\n".join(f"  {shown(row)}" for row in rows[:8])
    return f"Being read were the samples at these dataset indices:\n{listed}"


class _Fetched:
    """A dataset whose index is a task and whose sample is a micro-batch."""

    def __init__(self, fetch: Fetch) -> None:
        self.fetch = fetch

    def __getitem__(self, task: Task) -> Any:
        try:
            return self.fetch(task)
        except StopIteration as error:  # a loader would take it for the end
            msg = "A dataset or collate function raised StopIteration."
            raise RuntimeError(msg) from error


def _as_is(value: Any) -> Any:
    return value


def assembled(pairs: Iterable[Pair], plan: Plan) -> Iterator[Batch]:
    """Yield batches of what was read; their filler is stand-ins, and what repeats."""
    for portion, values in pairs:
        start, after, num_samples, spans, indices, own, _, shares = portion
        weights: tuple[int, ...] = ()
        filler: tuple[Filler, ...] = ()
        for low, high in spans:
            weights += (high - low,)
            filler += (low == high or (high > own and _beyond(low, high, own)),)
        yield Batch(
            micro_batches=tuple(values),
            weights=weights,
            start=start,
            cursor=after,
            num_samples=num_samples,
            parts_indices=indices,
            parts_filler=filler,
            shares=partial(plan.counts, num_samples)
            if shares is None
            else partial(list, shares),
        )


def _beyond(low: int, high: int, own: int) -> Filler:
    """Return which positions of a micro-batch repeat samples, beyond the epoch's own."""
    return np.arange(low, high) >= own
