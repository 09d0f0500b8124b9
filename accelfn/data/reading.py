# SPDX-License-Identifier: Apache-2.0
"""Which reader reads a dataset: by index or as a stream, here or in other processes."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import attrs
from torch.utils.data import default_collate

from accelfn.data.cursor import Cursor
from accelfn.data.dispatch import read_dispatched
from accelfn.data.epoch import Portion, epoch_of, portions
from accelfn.data.fetch import Fetch
from accelfn.data.plan import Plan
from accelfn.data.readers import Pair, in_workers, read_ahead, read_here
from accelfn.data.sharded import Sharded
from accelfn.data.stream import Share, Stream, read_stream, say_cost
from accelfn.data.workers import Place, say_too_many
from accelfn.world import World

if TYPE_CHECKING:
    from accelfn.data.dataset import Data


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
