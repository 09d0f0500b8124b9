# SPDX-License-Identifier: Apache-2.0
"""Streams: datasets that are read from front to back, and cannot be asked by index.

Every process reads the whole stream and keeps the samples at its own positions, so the order
does not depend on ranks or workers, and no sample is seen twice. Where the stream stands is
what its own `state_dict()` says; that travels with each batch.
"""

import copy
import logging
import warnings
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, cast
from weakref import WeakValueDictionary

import attrs
import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from accelfn.base import codec, draws
from accelfn.collectives import all_gather, scatter_bytes
from accelfn.collectives.failures import check_world
from accelfn.data.epoch import Portion
from accelfn.data.loaders import (
    Collate,
    Place,
    nothing_said,
    start_method,
    watch_workers,
)
from accelfn.data.order import promised_length
from accelfn.data.plan import Batch, Cursor, Plan, Span, even_part
from accelfn.errors import ArgumentError, BatchError, DataError
from accelfn.world import World

_LOG = logging.getLogger("accelfn")
_BEFORE = -1
"""The position whose key is that of what is drawn before the first sample."""


def is_stream(dataset: Any) -> bool:
    """Whether a dataset can be iterated over, and not asked by index."""
    if isinstance(dataset, IterableDataset):
        return True
    return hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__")


def check_promise(dataset: Any, count: int, epoch: int, *, ended: bool) -> None:
    """Raise if a stream has given more or, when it has ended, fewer than it says it has.

    Raises:
        DataError: with both numbers.
    """
    promised = promised_length(dataset)
    if promised is None or count == promised or (count < promised and not ended):
        return
    less = "only " if count < promised else "at least "
    msg = (
        f"{type(dataset).__name__} says that it has {promised} samples, and gave"
        f" {less}{count} in epoch {epoch}. Let its __len__ say what it yields, or leave"
        " __len__ out."
    )
    raise DataError(msg)


def is_stateful(dataset: Any) -> bool:
    """Whether it can say where it stands, and be put there."""
    return hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")


def say_cost(dataset: Any, count: int) -> None:
    """Log that so many samples are read again."""
    _LOG.warning(
        "Reading %d samples of %s again, to go on behind them.",
        count,
        type(dataset).__name__,
    )


def stateless(dataset: Any, cursor: Cursor) -> str:
    """Return why a stream cannot go on at a cursor, and what to do."""
    kind, where = (
        type(dataset).__name__,
        f"sample {cursor.samples} of epoch {cursor.epoch}",
    )
    again = (
        f"af.Data(..., replay=True), which reads {cursor.samples} samples again to get"
        " there."
    )
    if is_stateful(dataset):
        return (
            f"{kind} is a stream, and the cursor at {where} does not hold its state:"
            " af.seek knows none, and the samples in a shuffle buffer of datasets are not"
            " in its own. Take the cursor of a batch or of af.load, shuffle without a"
            f" buffer, or give {again}"
        )
    return (
        f"{kind} is a stream without state, so it cannot go on at {where}. Give it"
        f" state_dict() and load_state_dict(), or {again}"
    )


def _is_lossy(dataset: Any) -> bool:
    """Whether a state leaves samples out: those in a shuffle buffer of `datasets`."""
    inside = [getattr(dataset, "_ex_iterable", None)]
    for each in inside:
        if hasattr(each, "buffer_size"):
            return True
        inner = getattr(each, "ex_iterable", None)
        inside += [inner] if inner is not None else getattr(each, "ex_iterables", [])
    return False


def first_state(dataset: Any) -> Any:
    """Return what a stream says of its place before it is read; None if it says nothing.

    A loader is not asked: it would start its workers, and begins anew by itself. Of those
    of torchdata.nodes, one that was asked ignores the state that it is given next. A stream
    of `datasets` would name the place of its newest iterator, even one that somebody has
    only looked into; `iter` begins with the state that was loaded, if any.
    """
    if hasattr(dataset, "_starting_state_dict"):
        return copy.deepcopy(dataset._starting_state_dict) or {}
    is_nodes = type(dataset).__module__.startswith("torchdata.nodes")
    if not is_stateful(dataset) or isinstance(dataset, DataLoader) or is_nodes:
        return None
    try:
        return copy.deepcopy(dataset.state_dict())
    except Exception:  # noqa: BLE001 - it has a place only once it is read
        return None


_READERS: "WeakValueDictionary[int, Opened]" = WeakValueDictionary()
"""Who reads a stream, by its id: a stream with state stands in one place only."""


class Opened:
    """One epoch of a stream, from a cursor on, a sample at a time.

    What the stream draws from default generators comes from (seed, epoch, position).
    """

    def __init__(
        self, dataset: Any, key: int, start: Cursor, first: Any = None
    ) -> None:
        """Begin the epoch, and go to the cursor.

        `first` is the dataset's state before it was read: one that remembers where another
        loop left it begins anew.
        """
        self.position = start.samples
        self._dataset, self._key, self._epoch = dataset, key, start.epoch
        if start.memory is None and first is not None:
            dataset.load_state_dict(copy.deepcopy(first))
        if callable(getattr(dataset, "set_epoch", None)):
            dataset.set_epoch(start.epoch)
        for each in (dataset, getattr(dataset, "sampler", None)):  # a loader's
            own = getattr(each, "generator", None)
            if isinstance(own, torch.Generator):
                own.manual_seed(key)
        knows = is_stateful(dataset)
        memory = copy.deepcopy(start.memory)
        with draws.seeded() as drawing:
            drawing.begin(draws.fold(key, _BEFORE))
            if memory is not None and knows:
                dataset.load_state_dict(memory)
            self._iterator: Any = iter(dataset)
            if memory is not None and not knows:
                self._iterator.load_state_dict(memory)
        both = (dataset, self._iterator)
        self._knowing: Any = next((each for each in both if is_stateful(each)), None)
        _READERS[id(dataset)] = self
        if start.samples and memory is None:
            self._read_again(start.samples)

    def read(self) -> list[Any]:
        """Return the next sample in a list, or an empty one at the end.

        Raises:
            DataError: another loop began to read the stream, whose state is now of both.
        """
        if (
            self._knowing is self._dataset
            and _READERS.get(id(self._dataset)) is not self
        ):
            msg = (
                f"af.Data({type(self._dataset).__name__}): a second loop reads this stream, and"
                f" the first continues at sample {self.position} of epoch {self._epoch}, but a"
                " stream has one state_dict(). Make a dataset for each state, evaluation and"
                " simulated rank, or copy it before it is read: copy.deepcopy(dataset)."
            )
            raise DataError(msg)
        with draws.seeded() as drawing:
            drawing.begin(draws.fold(self._key, self.position))
            try:
                sample = next(self._iterator)
            except StopIteration:
                return []
            except Exception as error:
                error.add_note(
                    f"This was raised by {type(self._dataset).__name__} as sample"
                    f" {self.position} of epoch {self._epoch} was read."
                )
                raise
        self.position += 1
        return [sample]

    def memory(self) -> Any:
        """Return what the stream says of its place, as a value of its own."""
        if self._knowing is None or _is_lossy(self._dataset):
            return None
        return copy.deepcopy(self._knowing.state_dict())

    def _read_again(self, count: int) -> None:
        self.position = 0
        while self.position < count and self.read():
            pass


@attrs.frozen(eq=False)
class Stream:
    """A stream and how it is cut into updates.

    Attributes:
        dataset: an iterable.
        batch_size: samples of an update, over all ranks.
        remainder: what becomes of a short last batch.
        collate: makes a batch of samples.
        seed: of what is drawn.
        first: the dataset's state before it is read.
    """

    dataset: Any
    batch_size: int
    remainder: str
    collate: Collate
    seed: int
    first: Any = None

    def portions(
        self, plans: Sequence[Plan], start: Cursor, epochs: int | None
    ) -> Iterator[tuple[list[Portion], list[Any]]]:
        """Yield, for every update, what the ranks of these plans take, and its samples."""
        while epochs is None or start.epoch < epochs:
            for low, samples, own, after in self._epoch(start):
                span = (low, low + len(samples))
                cut = [_portion(plan, start, after, span, own) for plan in plans]
                yield cut, samples
                start = after

    def values(self, portion: Portion, samples: Sequence[Any]) -> list[Any]:
        """Return a rank's collated micro-batches of an update that has these samples."""
        low = portion.start.samples
        found: list[Any] = []
        for begin, stop in portion.spans:
            at = begin - low if stop > begin else min(begin - low, len(samples) - 1)
            found.append(self.collate(list(samples[at : at + max(stop - begin, 1)])))
        return found

    def _epoch(self, start: Cursor) -> Iterator[tuple[int, list[Any], int, Cursor]]:
        """Yield each update's place, samples, the end of what is no repeat, and cursor."""
        size, drop = self.batch_size, self.remainder == "drop"
        ahead = (
            size if drop else 1
        )  # whether a batch is the last is known before it is given
        opened = Opened(self.dataset, self._key(start.epoch), start, self.first)
        low, samples, memories = start.samples, list[Any](), dict[int, Any]()
        head: list[Any] | None = [] if low == 0 else None
        while True:
            while len(samples) < size + ahead and (more := opened.read()):
                samples += more
                if head is not None and len(head) < size:
                    head += more
                if (opened.position - start.samples) % size == 0:
                    memories[opened.position] = opened.memory()
            check_promise(self.dataset, opened.position, start.epoch, ended=False)
            ended = len(samples) < size + ahead
            taken, samples = samples[:size], samples[size:]
            if not taken or (drop and len(taken) < size):
                self._refuse_nothing(start, len(taken))
            is_last = ended and (not samples or (drop and len(samples) < size))
            own = low + len(taken)
            if is_last:
                check_promise(self.dataset, opened.position, start.epoch, ended=True)
                if self.remainder == "pad":
                    taken += self._repeats(head, size - len(taken), start.epoch)
                yield low, taken, own, Cursor(start.epoch + 1, 0)
                return
            yield low, taken, own, Cursor(start.epoch, own, memory=memories.pop(own))
            low = own

    def _repeats(self, head: list[Any] | None, count: int, epoch: int) -> list[Any]:
        """Return the first samples of the epoch, cyclically; read again after a resume."""
        if count and head is None:
            again = Opened(self.dataset, self._key(epoch), Cursor(epoch), self.first)
            head = []
            while len(head) < self.batch_size and (more := again.read()):
                head += more
        return [head[i % len(head)] for i in range(count)] if head else []

    def _key(self, epoch: int) -> int:
        return draws.key(self.seed, "data", epoch)

    def _refuse_nothing(self, start: Cursor, count: int) -> None:
        kind = type(self.dataset).__name__
        if start.samples:
            msg = (
                f"{kind} ended where it was to go on, at sample {start.samples} of epoch"
                f" {start.epoch}. Was it changed?"
            )
        elif count:
            msg = (
                f'af.Data(batch_size={self.batch_size}, remainder="drop"): {kind} has'
                f" {count} samples, so every batch would be dropped."
            )
        elif self.first:
            msg = (
                f"{kind} gave no sample in epoch {start.epoch}: it is empty, or was read to"
                " its end before af.Data took it, and begins with the state that it had then."
                " Give a dataset that was not read: make it again."
            )
        else:
            msg = (
                f"{kind} gave no sample in epoch {start.epoch}: it is empty, or ends for"
                " good, as an iterator does. Give an object whose __iter__ begins anew."
            )
        raise DataError(msg)


def _portion(plan: Plan, start: Cursor, after: Cursor, span: Span, own: int) -> Portion:
    """Return a rank's part of an update with samples at these positions."""
    spans = tuple(plan.parts(span))
    firsts = [min(begin, span[1] - 1) for begin, _ in spans]
    indices = tuple(
        np.arange(first, max(stop, first + 1)) % own  # repeats are the first samples
        for first, (_, stop) in zip(firsts, spans, strict=True)
    )
    return Portion(start, after, span[1] - span[0], spans, indices, own, key=0)


def read_stream(
    stream: Stream, plan: Plan, start: Cursor, epochs: int | None
) -> Iterator[tuple[Portion, list[Any]]]:
    """Read a rank's portions in this process."""
    for (portion,), samples in stream.portions([plan], start, epochs):
        yield portion, stream.values(portion, samples)


class Share(IterableDataset[Any]):
    """What one worker of several reads for a rank: every so many updates."""

    def __init__(
        self, stream: Stream, plan: Plan, start: Cursor, epochs: int | None
    ) -> None:
        """Take what is to be read."""
        self._stream, self._plan = stream, plan
        self._start, self._epochs = start, epochs

    def __iter__(self) -> Iterator[tuple[Portion, list[Any]]]:
        """Read the whole stream, and collate this worker's updates."""
        number, count = as_one_reader()
        updates: Iterable[Any] = self._stream.portions(
            [self._plan], self._start, self._epochs
        )
        for i, ((portion,), samples) in enumerate(updates):
            if i % count == number:
                yield portion, self._stream.values(portion, samples)


def as_one_reader() -> tuple[int, int]:
    """Return which worker of how many this is, and let no dataset find out.

    One that shards itself by torch's `get_worker_info()` then yields all its samples.
    """
    info = get_worker_info()
    torch_worker._worker_info = None  # pyright: ignore[reportPrivateUsage]
    return (0, 1) if info is None else (info.id, info.num_workers)


# Streams that give each rank samples of its own: read by torchdata, kept in step.
#
# Ranks may have different numbers of samples, and learn at each update how many there are.
# One that has none left takes part with filler until all have ended.


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
            portion = _own_portion((cursor, after), total, own, num_parts)
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
        given = watch_workers(loader, timeout=self.timeout, place=place, due=due)
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


def _own_portion(
    cursors: tuple[Cursor, Cursor], total: int, own: Span, num_parts: int
) -> Portion:
    spans = tuple(even_part(own, i, num_parts) for i in range(num_parts))
    indices = tuple(np.arange(begin, max(stop, begin + 1)) for begin, stop in spans)
    return Portion(*cursors, total, spans, indices, own=own[1], key=0)


# Dispatch: rank 0 reads a stream for all, and sends each rank its share.
#
# For streams that only one process can read: a socket, a queue, a database's cursor.
# Tensors and plain data travel; nothing is pickled.


_LABEL = "dispatch of data"


def read_dispatched(
    stream: Stream, plan: Plan, start: Cursor, epochs: int | None, world: World
) -> Iterator[tuple[Portion, list[Any]]]:
    """Yield this rank's portions, read by rank 0 for all.

    Ranks that share a batch, along "cp" and "tp", are told by the first of them.

    Raises:
        DataError: on every rank, if rank 0 could not read.
    """
    ranks, sharers = world.batch, world.along("cp", "tp")
    updates = None
    if world.is_main:
        plans = [_of_rank(plan, rank) for rank in range(ranks.size)]
        updates = stream.portions(plans, start, epochs)
    while epochs is None or start.epoch < epochs:
        failure, payloads = None, None
        if updates is not None:
            try:
                cut, samples = next(updates)
                payloads = [
                    codec.to_bytes(_portion_header(each, stream.values(each, samples)))
                    for each in cut
                ]
            except Exception as error:  # noqa: BLE001 - the others wait to be told
                failure = error
                payloads = [
                    codec.to_bytes({"failed": f"{type(error).__name__}: {error}"})
                ]
                payloads *= ranks.size
        copies = None
        if sharers.is_main:
            copies = [scatter_bytes(payloads, ranks, label=_LABEL)] * sharers.size
        received = codec.from_bytes(scatter_bytes(copies, sharers, label=_LABEL))
        if failure is not None:
            raise failure
        if "failed" in received:
            msg = f"Rank 0, which reads for all, could not: {received['failed']}"
            raise DataError(msg)
        portion = _heard(received)
        yield portion, received["values"]
        start = portion.after


def _of_rank(plan: Plan, rank: int) -> Plan:
    return attrs.evolve(
        plan, world_rank=rank, rank=rank if plan.num_shares > 1 else plan.rank
    )


def _portion_header(portion: Portion, values: list[Any]) -> dict[str, Any]:
    return {
        "start": portion.start.to_plain(),
        "after": portion.after.to_plain(),
        "num_samples": portion.num_samples,
        "spans": [list(span) for span in portion.spans],
        "indices": [indices.tolist() for indices in portion.indices],
        "own": portion.own,
        "values": values,
    }


def _heard(told: dict[str, Any]) -> Portion:
    return Portion(
        start=Cursor(*told["start"]),
        after=Cursor(*told["after"]),
        num_samples=told["num_samples"],
        spans=tuple((begin, stop) for begin, stop in told["spans"]),
        indices=tuple(np.array(each, np.int64) for each in told["indices"]),
        own=told["own"],
        key=0,
    )


# `lockstep`: streams of unequal length, a rank each, without a rank that waits in vain.


_ENDS = ("last", "first", "together")


def lockstep(
    iterable: Iterable[Any], world: World, *, ends: str = "last"
) -> Iterator[Batch]:
    """Yield this rank's own batches, as many on every rank.

    For loops over what ranks read for themselves: a step over `af.batches` needs no lockstep.
    A step takes what is yielded, and does not move the state's cursor. A list is taken for a
    rank's micro-batches, but for one that a DataLoader yields, which is its batch.

    Args:
        iterable: of this rank's batches; ranks may have different numbers of them.
        world: whose ranks go together; those that share a batch ("cp", "tp") give the same.
        ends: "last": when all ranks have ended; one that has ended takes part with its last
            batch, whose weight is 0. "first": as soon as one rank has ended. "together": all
            must end at once.

    Yields:
        Batches; `weights` of 0 mark those that do not count.

    Law: with "last", the mean over all that was seen is that of all ranks' samples.

    Cost: one all-gather of an integer a batch; with "last", the last batch is kept.

    Raises:
        DataError: ranks ended apart, and `ends="together"`; or one has no batch at all to
            stand in, and `ends="last"`.
        BatchError: a list of micro-batches has none.
        ArgumentError: `ends` is another word, or there is nothing to iterate over.
    """
    if ends not in _ENDS:
        expected = ", ".join(map(repr, _ENDS))
        msg = f"af.lockstep(ends={ends!r}): expected one of {expected}."
        raise ArgumentError(msg)
    check_world("af.lockstep", world)
    if not isinstance(iterable, Iterable):
        msg = (
            f"af.lockstep({type(iterable).__name__}): expected this rank's batches, as an"
            " iterable; an empty list where it has none."
        )
        raise ArgumentError(msg)
    batches = iter(iterable)
    if isinstance(iterable, DataLoader):
        # a list is what it makes of samples that are tuples
        batches = ([each] for each in batches)
    return _equal_batches(batches, world.batch, ends)


def _equal_batches(items: Iterator[Any], ranks: World, ends: str) -> Iterator[Batch]:
    number, last = 0, None
    while True:
        mine = [last := item for item in _next(items)]
        flags = all_gather(
            torch.tensor([len(mine)], device=ranks.device), ranks, label="lockstep"
        )
        having = [bool(flag) for flag in flags]
        if not any(having) or (ends == "first" and not all(having)):
            return
        without = [rank for rank, has in enumerate(having) if not has]
        if without and ends == "together":
            msg = (
                f"af.lockstep: rank {without[0]} ran out at batch {number}, others have"
                f" {number + 1} or more. Give every rank as many, or say what is to become"
                ' of the rest with ends="last" or ends="first".'
            )
            raise DataError(msg)
        if without and number == 0:
            msg = (
                f"af.lockstep: rank {without[0]} of {ranks.size} has no batch, and so none"
                ' to stand in with weight 0. Give it one, or ends="first".'
            )
            raise DataError(msg)
        if isinstance(last, list) and not last:
            msg = (
                f"af.lockstep: batch {number} of rank {ranks.rank} is an empty list; a list is"
                " a rank's micro-batches, at least one. Leave the batch out."
            )
            raise BatchError(msg)
        yield _batch(last, having, ranks.rank)
        number += 1


def _next(items: Iterator[Any]) -> list[Any]:
    """Return the next item in a list, or an empty one."""
    for item in items:
        return [item]
    return []


def _batch(item: Any, having: list[bool], rank: int) -> Batch:
    values = tuple(item) if isinstance(item, list) else (item,)
    counts = having[rank]
    return Batch(
        micro_batches=values,
        weights=(None if counts else 0,) * len(values),
        start=None,
        cursor=None,
        num_samples=0,
        parts_indices=(np.empty(0, np.int64),) * len(values),
        parts_filler=(not counts,) * len(values),
        shares=partial(list, [[None if has else 0] * len(values) for has in having]),
    )
