# SPDX-License-Identifier: Apache-2.0
"""Streams that give each rank samples of its own: read by torchdata, kept in step.

Ranks may have different numbers of samples, and learn at each update how many there are. One
that has none left takes part with filler until all have ended.
"""

import copy
import warnings
from collections.abc import Iterator
from typing import Any, cast

import attrs
import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from accelfn.base import draws
from accelfn.collectives import all_gather
from accelfn.data.cursor import Cursor
from accelfn.data.cut import Span, even_part
from accelfn.data.epoch import Portion
from accelfn.data.fetch import Collate
from accelfn.data.plan import Plan
from accelfn.data.stream import Opened, check_promise, say_cost, stateless
from accelfn.data.workers import Place, nothing_said, start_method, watched
from accelfn.errors import DataError
from accelfn.world import World


class Counted(IterableDataset[Any]):
    """A rank's stream in one worker, that knows how many samples it gave.

    torchdata saves and restores it in each worker.
    """

    def __init__(
        self, dataset: Any, key: int, epoch: int, *, replay: bool, first: Any
    ) -> None:
        """Take the stream, its first state, the key of its draws, whether to read again."""
        self._dataset, self._key, self._epoch = dataset, key, epoch
        self._replay, self._first = replay, first
        self._start: tuple[int, Any] = (0, None)
        self._opened: Opened | None = None
        self._ended = False

    def __iter__(self) -> Iterator[Any]:
        """Yield samples from where it stands; of one epoch, and so none after its end."""
        if self._ended:
            return
        info = get_worker_info()
        key = draws.fold(self._key, 0 if info is None else info.id)
        (count, memory), self._start = self._start, (0, None)
        if count and memory is None:
            if not self._replay:
                raise DataError(stateless(self._dataset, Cursor(self._epoch, count)))
            if info is None or info.id == 0:
                say_cost(self._dataset, count)
        start = Cursor(self._epoch, count, memory=memory)
        self._opened = Opened(self._dataset, key, start, self._first)
        while more := self._opened.read():
            if info is None:  # of several workers each may have a part
                self._check(ended=False)
            yield from more
        if info is None:
            self._check(ended=True)
        self._ended = True

    def _check(self, *, ended: bool) -> None:
        if self._opened is not None:
            count = self._opened.position
            check_promise(self._dataset, count, self._epoch, ended=ended)

    def state_dict(self) -> dict[str, Any]:
        """Return where it stands."""
        count, memory = self._start[0], copy.deepcopy(self._start[1])
        if self._opened is not None:
            count, memory = self._opened.position, self._opened.memory()
        return {"count": count, "memory": memory, "ended": self._ended}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there at the next `iter`."""
        self._start, self._opened = (state["count"], state["memory"]), None
        self._ended = state["ended"]


@attrs.frozen(eq=False)
class Collated:
    """Collates the micro-batches of a share; what a worker is given."""

    collate: Collate
    num_parts: int

    def __call__(self, samples: list[Any]) -> tuple[int, list[Any]]:
        """Return how many samples there are, and their micro-batches."""
        values: list[Any] = []
        for i in range(self.num_parts):
            begin, stop = even_part((0, len(samples)), i, self.num_parts)
            at = min(begin, len(samples) - 1)
            values.append(self.collate(samples[at : max(stop, at + 1)]))
        return len(samples), values


@attrs.frozen(eq=False, kw_only=True)
class Sharded:
    """A rank's own stream, and how it is read.

    Attributes:
        dataset: an iterable of this rank's samples.
        batch_size: samples of an update, over all ranks.
        collate: makes a batch of samples.
        seed: of what is drawn.
        num_workers: processes that read ahead.
        timeout: seconds that one may take.
        ranks: in which ranks keep in step.
        replay: whether a stream without state is read again to resume it.
        place: whose the first batch is, and for which update; errors name it.
        first: the dataset's state before it is read.
    """

    dataset: Any
    batch_size: int
    collate: Collate
    seed: int
    num_workers: int
    timeout: float
    ranks: World
    replay: bool = False
    place: Place
    first: Any = None

    def portions(
        self, plan: Plan, start: Cursor, epochs: int | None
    ) -> Iterator[tuple[Portion, list[Any]]]:
        """Yield this rank's part of every update."""
        update = self.place.update
        while epochs is None or start.epoch < epochs:
            for portion, values in self._epoch(plan, start, update):
                yield portion, values
                start, update = portion.after, update + 1

    def _epoch(
        self, plan: Plan, start: Cursor, update: int
    ) -> Iterator[tuple[Portion, list[Any]]]:
        begin, end = even_part((0, self.batch_size), plan.world_rank, plan.world_size)
        share = max(1, end - begin)
        num_parts = len(plan.parts((0, self.batch_size)))
        loader = self._loader(share, num_parts, start)
        items = self._items(loader, start, update)
        item, cursor = next(items, None), start
        values: list[Any] = []
        held: tuple[Any, ...] = ()
        while True:
            count = 0
            if item is not None:
                count, values = item
            elif not values and cursor.samples:
                values = self._stand_in(num_parts, start.epoch)
            memory = self._memory(loader) if item is not None else cursor.memory
            item = next(items, None) if item is not None else None
            counts, more = self._agreed(count, more=item is not None)
            self._refuse_nothing(counts, values, cursor)
            total, before = sum(counts), sum(counts[: self.ranks.rank])
            first = cursor.samples + before
            after = (
                Cursor(start.epoch, cursor.samples + total, memory=memory)
                if more
                else Cursor(start.epoch + 1, 0)
            )
            own = (first, first + count)
            portion = _portion((cursor, after), total, own, num_parts)
            cut = Plan(num_micro_batches=num_parts)
            portion = portion._replace(shares=[cut.counts(n)[0] for n in counts])
            if count:
                held = portion.indices
            elif held:  # the stand-in is the last batch
                portion = portion._replace(indices=held)
            yield portion, values
            if not more:
                return
            cursor = after

    def _items(self, loader: Any, start: Cursor, update: int) -> Iterator[Any]:
        """Yield what the loader gives."""
        if not self.num_workers:
            yield from loader
            return
        num_read = 0

        def due() -> tuple[int, str]:
            what = f"rank {self.ranks.rank}'s own stream, in epoch {start.epoch}"
            return num_read, f"Being read was {what}."

        place = attrs.evolve(self.place, update=update)
        given = watched(loader, timeout=self.timeout, place=place, due=due)
        for num_read, item in enumerate(given, 1):  # noqa: B007 - `due` reads it
            yield item

    def _loader(self, share: int, num_parts: int, start: Cursor) -> Any:
        # costs as much to import as all of accelfn
        from torchdata.stateful_dataloader import (  # noqa: PLC0415
            StatefulDataLoader,
        )

        key = self._key(start.epoch)
        with nothing_said():
            # torchdata calls what torch deprecates
            warnings.filterwarnings("ignore", "'set_vital' is deprecated")
            loader = StatefulDataLoader(
                Counted(
                    self.dataset,
                    key,
                    start.epoch,
                    replay=self.replay,
                    first=self.first,
                ),
                batch_size=share,
                num_workers=self.num_workers,
                collate_fn=cast("Collate", Collated(self.collate, num_parts)),
                timeout=self.timeout if self.num_workers else 0,
                multiprocessing_context=start_method(self.num_workers),
                generator=torch.Generator().manual_seed(key),
            )
        if start.memory is not None:
            if start.memory["num_workers"] != self.num_workers:
                msg = (
                    f"This stream was read by {start.memory['num_workers']} workers a rank,"
                    f" each of its own part, and cannot go on with {self.num_workers}."
                )
                raise DataError(msg)
            loader.load_state_dict(copy.deepcopy(start.memory["loader"]))
        return loader

    def _stand_in(self, num_parts: int, epoch: int) -> list[Any]:
        """Return micro-batches of the rank's first sample, after it was resumed at its end."""
        start = Cursor(epoch)
        first = Opened(self.dataset, self._key(epoch), start, self.first).read()
        return Collated(self.collate, num_parts)(first)[1]

    def _key(self, epoch: int) -> int:
        return draws.key(self.seed, "data", epoch, "rank", self.ranks.rank)

    def _memory(self, loader: Any) -> dict[str, Any]:
        return {
            "num_workers": self.num_workers,
            "loader": copy.deepcopy(loader.state_dict()),
        }

    def _agreed(self, count: int, *, more: bool) -> tuple[list[int], bool]:
        """Return how many samples each rank has, and whether any has more."""
        mine = torch.tensor([count, more], device=self.ranks.device)
        rows = [
            each.tolist() for each in all_gather(mine, self.ranks, label="lockstep")
        ]
        return [int(row[0]) for row in rows], any(row[1] for row in rows)

    def _refuse_nothing(
        self, counts: list[int], values: list[Any], cursor: Cursor
    ) -> None:
        if cursor.samples or all(counts):
            return
        without = [rank for rank, count in enumerate(counts) if not count]
        msg = (
            f"af.Data(sharded=True): rank {without[0]} of {self.ranks.size} got no sample in"
            f" epoch {cursor.epoch}, and so has no stand-in to take part with. Samples by"
            f" rank in the first update: {counts}."
        )
        raise DataError(msg)


def _portion(
    cursors: tuple[Cursor, Cursor], total: int, own: Span, num_parts: int
) -> Portion:
    spans = tuple(even_part(own, i, num_parts) for i in range(num_parts))
    indices = tuple(np.arange(begin, max(stop, begin + 1)) for begin, stop in spans)
    return Portion(*cursors, total, spans, indices, own=own[1], key=0)
