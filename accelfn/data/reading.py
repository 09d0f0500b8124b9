# SPDX-License-Identifier: Apache-2.0
"""Readers of a dataset: by index or as a stream, in this process or in workers."""

from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import attrs
import numpy as np
import torch
from torch.utils.data import DataLoader, default_collate

from accelfn.data.epoch import Portion, epoch_of, portions
from accelfn.data.loaders import (
    Fetch,
    Place,
    Task,
    nothing,
    nothing_said,
    say_too_many,
    start_method,
    watch_workers,
)
from accelfn.data.plan import Batch, Cursor, Filler, Plan
from accelfn.data.sources import format_indices
from accelfn.data.stream import (
    Sharded,
    Share,
    Stream,
    read_dispatched,
    read_stream,
    say_cost,
)
from accelfn.world import World

if TYPE_CHECKING:
    from accelfn.data.dataset import Data

# Readers: portions into batches, in this process or in others that read ahead.


Pair: TypeAlias = tuple[Portion, list[Any]]
"""What was to be read, and the values of its micro-batches."""


def tasks_of(portion: Portion) -> list[Task]:
    """Return the reading tasks, one per micro-batch."""
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
    for value in watch_workers(loader, timeout=timeout, place=place, due=due):
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
    for portion, values in watch_workers(loader, timeout=timeout, place=place, due=due):
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
    listed = "\n".join(f"  {format_indices(row)}" for row in rows[:8])
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


def assemble_batches(pairs: Iterable[Pair], plan: Plan) -> Iterator[Batch]:
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


@attrs.frozen(kw_only=True)
class Reading:
    """Which batches are read, and for whom.

    Attributes:
        plan: which samples of an update are this rank's.
        start: where to begin.
        epochs: the number of the epoch before which to end; None: never.
        seed: of the order, and of what reading draws.
        world: in which ranks read.
        update: of the state, for which the first batch is; it is named in errors.
    """

    plan: Plan
    start: Cursor = attrs.field(factory=Cursor)
    epochs: int | None
    seed: int
    world: World
    update: int = 0


def pairs_of(data: "Data", reading: Reading) -> Iterator[Pair]:
    """Yield what this rank takes of each update, and its values, on the CPU."""
    if reading.world.is_main:
        say_too_many(data.num_workers)
    if data.is_stream:
        return _stream_pairs(data, reading)
    taken, fetch = _portions(data, reading), Fetch(data.source, data.collate)
    if not data.num_workers:
        return read_here(taken, fetch)
    return read_ahead(
        taken,
        fetch,
        num_workers=data.num_workers,
        timeout=data.timeout,
        place=_place(reading),
    )


def _portions(data: "Data", reading: Reading) -> Iterator[Portion]:
    start, epochs = reading.start, reading.epochs
    while epochs is None or start.epoch < epochs:
        epoch = epoch_of(data, seed=reading.seed, number=start.epoch)
        yield from portions(epoch, reading.plan, start)
        start = Cursor(start.epoch + 1)


def _stream_pairs(data: "Data", reading: Reading) -> Iterator[Pair]:
    collate = data.collate or default_collate
    plan, start, epochs = reading.plan, reading.start, reading.epochs
    if data.sharded:
        sharded = Sharded(
            dataset=data.dataset,
            batch_size=data.batch_size,
            collate=collate,
            seed=reading.seed,
            num_workers=data.num_workers,
            timeout=data.timeout,
            ranks=reading.world.batch,
            place=_place(reading),
            replay=data.replay,
            first=data.first,
        )
        return sharded.portions(plan, start, epochs)
    stream = Stream(
        data.dataset,
        data.batch_size,
        data.remainder,
        collate,
        reading.seed,
        data.first,
    )
    if start.samples and start.memory is None and reading.world.is_main:
        say_cost(data.dataset, start.samples)
    if data.dispatch:
        return read_dispatched(stream, plan, start, epochs, reading.world)
    if not data.num_workers:
        return read_stream(stream, plan, start, epochs)
    return in_workers(
        Share(stream, plan, start, epochs),
        start,
        num_workers=data.num_workers,
        timeout=data.timeout,
        place=_place(reading),
    )


def _place(reading: Reading) -> Place:
    return Place(reading.world.rank, reading.world.size, reading.update)
