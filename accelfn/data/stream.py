# SPDX-License-Identifier: Apache-2.0
"""Streams: datasets that are read from front to back, without an index.

Every process reads the whole stream and keeps the samples at its own positions. So the order
does not depend on ranks or workers, and no sample is seen twice. The stream's own `state_dict()`
says where it is; that state travels with each batch.
"""

import copy
import logging
import warnings
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakValueDictionary

import attrs
import numpy as np
import torch
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    default_collate,
    get_worker_info,
)
from torch.utils.data._utils import worker as torch_worker

from accelfn.base import codec, draws
from accelfn.collectives.failures import check_world
from accelfn.collectives.packed import all_gather_list, scatter_bytes
from accelfn.data.loaders import (
    Collate,
    Place,
    mute_worker_warnings,
    start_method,
    watch_workers,
)
from accelfn.data.order import promised_length, seed_generators
from accelfn.data.plan import Batch, Cursor, Plan, Portion, Span, even_part
from accelfn.errors import ArgumentError, BatchError, DataError
from accelfn.world import World

if TYPE_CHECKING:
    from accelfn.data.dataset import Data

_LOG = logging.getLogger("accelfn")
_BEFORE = -1
"""The position whose key is that of random numbers before the first sample."""


def is_stateful(dataset: Any) -> bool:
    """Return whether an object has `state_dict` and `load_state_dict`."""
    return hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")


def check_promise(dataset: Any, count: int, epoch: int, *, ended: bool) -> None:
    """Raise if a stream gave more samples than its length or, at its end, fewer.

    Raises:
        DataError: with both numbers.
    """
    length = promised_length(dataset)
    if length is None or count == length or (count < length and not ended):
        return
    wrong_by = "only " if count < length else "at least "
    msg = (
        f"{type(dataset).__name__} says that it has {length} samples, and gave"
        f" {wrong_by}{count} in epoch {epoch}. Let its __len__ say what it yields, or leave"
        " __len__ out."
    )
    raise DataError(msg)


def log_replay(dataset: Any, count: int) -> None:
    """Log that samples are read again."""
    kind = type(dataset).__name__
    _LOG.warning("Reading %d samples of %s again, to continue after them.", count, kind)


def resume_error(dataset: Any, cursor: Cursor) -> DataError:
    """Return the error for a stream that cannot resume at a cursor."""
    kind = type(dataset).__name__
    place = f"sample {cursor.samples} of epoch {cursor.epoch}"
    replay = f"af.Data(..., replay=True), which reads {cursor.samples} samples again."
    if is_stateful(dataset):
        return DataError(
            f"{kind} is a stream, and the cursor at {place} does not hold its state:"
            " af.seek has no state, and the state of datasets lacks the samples in a shuffle"
            " buffer. Take the cursor of a batch or of af.load, shuffle without a buffer, or"
            f" give {replay}"
        )
    return DataError(
        f"{kind} is a stream without state, so it cannot resume at {place}. Give it"
        f" state_dict() and load_state_dict(), or {replay}"
    )


def _is_lossy(dataset: Any) -> bool:
    """Return whether a state lacks samples: those in a shuffle buffer of `datasets`."""
    iterables = [getattr(dataset, "_ex_iterable", None)]
    for iterable in iterables:
        if hasattr(iterable, "buffer_size"):
            return True
        inner = getattr(iterable, "ex_iterable", None)
        iterables += (
            [inner] if inner is not None else getattr(iterable, "ex_iterables", [])
        )
    return False


def first_state(dataset: Any) -> Any:
    """Return a stream's state before it is read; None if it has no state.

    accelfn does not ask a loader: it would start its workers, and it starts again by itself. A
    node of torchdata.nodes ignores the state that it is given after it was asked. A stream of
    `datasets` would give the place of its newest iterator, even of one that somebody has only
    looked into; `iter` begins with the state that was loaded, if any.
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
"""The reader of each stream, by its id: a stream with state has one place only."""


class Opened:
    """One epoch of a stream, from a cursor on, a sample at a time.

    Random numbers of the stream from default generators depend on (seed, epoch, position).
    """

    def __init__(
        self, dataset: Any, key: int, start: Cursor, first: Any = None
    ) -> None:
        """Begin the epoch, and go to the cursor.

        `first` is the dataset's state before it was read. With it, a dataset that remembers
        where another loop left it begins again.
        """
        self.position = start.samples
        self._dataset, self._key, self._epoch = dataset, key, start.epoch
        if start.memory is None and first is not None:
            dataset.load_state_dict(copy.deepcopy(first))
        if callable(getattr(dataset, "set_epoch", None)):
            dataset.set_epoch(start.epoch)
        seed_generators(dataset, key)
        memory = copy.deepcopy(start.memory)
        self._stateful: Any = dataset if is_stateful(dataset) else None
        with draws.seeded() as drawing:
            drawing.begin(draws.fold(key, _BEFORE))
            if memory is not None and self._stateful is not None:
                dataset.load_state_dict(memory)
            self._iterator: Any = iter(dataset)
            if memory is not None and self._stateful is None:
                self._iterator.load_state_dict(memory)
        if self._stateful is None and is_stateful(self._iterator):
            self._stateful = self._iterator
        _READERS[id(dataset)] = self
        if start.samples and memory is None:
            self.position = 0
            while self.position < start.samples and self.read():
                pass

    def read(self) -> list[Any]:
        """Return the next sample in a list, or an empty list at the end.

        Raises:
            DataError: another loop reads the stream, and now both change its state.
        """
        kind, is_newest = type(self._dataset).__name__, _READERS.get(id(self._dataset))
        if self._stateful is self._dataset and is_newest is not self:
            msg = (
                f"af.Data({kind}): a second loop reads this stream, and the first continues at"
                f" sample {self.position} of epoch {self._epoch}, but a stream has one"
                " state_dict(). Make a dataset for each state, evaluation and simulated rank,"
                " or copy it before it is read: copy.deepcopy(dataset)."
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
                    f"This was raised by {kind} as sample {self.position} of epoch"
                    f" {self._epoch} was read."
                )
                raise
        self.position += 1
        return [sample]

    def memory(self) -> Any:
        """Return a copy of the stream's state."""
        if self._stateful is None or _is_lossy(self._dataset):
            return None
        return copy.deepcopy(self._stateful.state_dict())


def _collate_spans(
    collate: Collate, samples: Sequence[Any], spans: Iterable[Span], low: int = 0
) -> list[Any]:
    """Collate spans of samples that begin at `low`; an empty span takes a stand-in."""
    values: list[Any] = []
    for begin, stop in spans:
        at = min(begin - low, len(samples) - 1)
        values.append(collate(list(samples[at : at + max(stop - begin, 1)])))
    return values


@attrs.frozen(eq=False)
class Stream:
    """A stream and how it is cut into updates.

    Attributes:
        data: the stream, with its batch size.
        seed: the seed of random numbers.
    """

    data: "Data"
    seed: int

    def portions(
        self, plans: Sequence[Plan], start: Cursor, epochs: int | None
    ) -> Iterator[tuple[list[Portion], list[Any]]]:
        """Yield, for every update, the portions of these plans, and the samples."""
        while epochs is None or start.epoch < epochs:
            for low, samples, end, after in self._epoch(start):
                span = (low, low + len(samples))
                own_portions = [
                    _portion(plan, start, after, span, end) for plan in plans
                ]
                yield own_portions, samples
                start = after

    def values(self, portion: Portion, samples: Sequence[Any]) -> list[Any]:
        """Return a rank's collated micro-batches of an update with these samples."""
        collate = self.data.collate or default_collate
        return _collate_spans(collate, samples, portion.spans, portion.start.samples)

    def _open(self, start: Cursor) -> Opened:
        key = draws.key(self.seed, "data", start.epoch)
        return Opened(self.data.dataset, key, start, self.data.first)

    def _epoch(self, start: Cursor) -> Iterator[tuple[int, list[Any], int, Cursor]]:
        """Yield each update's position, samples, end without repeats, and cursor."""
        size, drop = self.data.global_batch_size, self.data.remainder == "drop"
        # read so far ahead that the last batch is known before it is yielded
        need = 2 * size if drop else size + 1
        source = self._open(start)
        low, samples, memories = start.samples, list[Any](), dict[int, Any]()
        head: list[Any] | None = [] if low == 0 else None
        while True:
            while len(samples) < need and (more := source.read()):
                samples += more
                if head is not None and len(head) < size:
                    head += more
                if (source.position - start.samples) % size == 0:
                    memories[source.position] = source.memory()
            is_last = len(samples) < need
            batch, samples = samples[:size], samples[size:]
            if not batch or (drop and len(batch) < size):
                self._raise_empty(start, len(batch))
            count = source.position
            check_promise(self.data.dataset, count, start.epoch, ended=is_last)
            end = low + len(batch)
            if is_last:
                if self.data.remainder == "pad":
                    batch += self._repeats(head, size - len(batch), start.epoch)
                yield low, batch, end, Cursor(start.epoch + 1, 0)
                return
            yield low, batch, end, Cursor(start.epoch, end, memory=memories.pop(end))
            low = end

    def _repeats(self, head: list[Any] | None, count: int, epoch: int) -> list[Any]:
        """Return the first samples of the epoch, cyclically; read again after a resume."""
        if count and head is None:
            source = self._open(Cursor(epoch))
            head = []
            while len(head) < self.data.global_batch_size and (more := source.read()):
                head += more
        return [head[i % len(head)] for i in range(count)] if head else []

    def _raise_empty(self, start: Cursor, count: int) -> None:
        kind = type(self.data.dataset).__name__
        if start.samples:
            msg = (
                f"{kind} ended where it was to continue, at sample {start.samples} of epoch"
                f" {start.epoch}. Was it changed?"
            )
        elif count:
            msg = (
                f'af.Data(global_batch_size={self.data.global_batch_size}, remainder="drop"):'
                f" {kind} has {count} samples, so every batch would be dropped."
            )
        elif self.data.first:
            msg = (
                f"{kind} gave no sample in epoch {start.epoch}: it is empty, or it was read to"
                " its end before af.Data took it, and each epoch begins with that state. Give"
                " a dataset that was not read: make it again."
            )
        else:
            msg = (
                f"{kind} gave no sample in epoch {start.epoch}: it is empty, or it ends for"
                " good, as an iterator does. Give an object whose __iter__ begins anew."
            )
        raise DataError(msg)


def _portion(
    plan: Plan, start: Cursor, after: Cursor, span: Span, num_own: int
) -> Portion:
    """Return a rank's part of an update with samples at these positions."""
    spans = tuple(plan.parts(span))
    firsts = [min(begin, span[1] - 1) for begin, _ in spans]
    indices = tuple(
        np.arange(first, max(stop, first + 1))
        % num_own  # repeats are the first samples
        for first, (_, stop) in zip(firsts, spans, strict=True)
    )
    return Portion(start, after, span[1] - span[0], spans, indices, num_own, key=0)


def read_stream(
    stream: Stream, plan: Plan, start: Cursor, epochs: int | None
) -> Iterator[tuple[Portion, list[Any]]]:
    """Read a rank's portions in this process."""
    for (portion,), samples in stream.portions([plan], start, epochs):
        yield portion, stream.values(portion, samples)


@attrs.frozen(eq=False, slots=False)
class Share(IterableDataset[Any]):
    """Every so many updates of a rank, which one of its workers reads."""

    stream: Stream
    plan: Plan
    start: Cursor
    epochs: int | None

    def __iter__(self) -> Iterator[tuple[Portion, list[Any]]]:
        """Read the whole stream, and collate this worker's updates."""
        number, count = hide_worker_info()
        updates = self.stream.portions([self.plan], self.start, self.epochs)
        for i, ((portion,), samples) in enumerate(updates):
            if i % count == number:
                yield portion, self.stream.values(portion, samples)


def hide_worker_info() -> tuple[int, int]:
    """Return this worker's number and the number of workers, and hide both from datasets.

    A dataset that shards itself by torch's `get_worker_info()` then yields all its samples.
    """
    info = get_worker_info()
    torch_worker._worker_info = None  # pyright: ignore[reportPrivateUsage]
    return (0, 1) if info is None else (info.id, info.num_workers)


# Streams that give each rank different samples: read by torchdata, kept in step.
#
# Ranks may have different numbers of samples, and exchange the numbers at each update. A rank
# that has no sample left takes part with filler until all ranks have ended.


class Counted(IterableDataset[Any]):
    """A rank's stream in one worker, with a count of its samples.

    torchdata saves and restores it in each worker.
    """

    def __init__(self, data: "Data", key: int, epoch: int) -> None:
        """Take the stream and the key of its random numbers."""
        self._data, self._key, self._epoch = data, key, epoch
        self._start: tuple[int, Any] = (0, None)
        self._opened: Opened | None = None
        self._ended = False

    def __iter__(self) -> Iterator[Any]:
        """Yield the rest of one epoch's samples."""
        if self._ended:
            return
        info, dataset = get_worker_info(), self._data.dataset
        key = draws.fold(self._key, 0 if info is None else info.id)
        (count, memory), self._start = self._start, (0, None)
        start = Cursor(self._epoch, count, memory=memory)
        if count and memory is None:
            if not self._data.replay:
                raise resume_error(dataset, start)
            if info is None or info.id == 0:
                log_replay(dataset, count)
        source = self._opened = Opened(dataset, key, start, self._data.first)
        while not self._ended:
            samples = source.read()
            self._ended = not samples
            if info is None:  # each of several workers may have a part
                count = source.position
                check_promise(dataset, count, self._epoch, ended=self._ended)
            yield from samples

    def state_dict(self) -> dict[str, Any]:
        """Return the current place."""
        count, memory = self._start[0], copy.deepcopy(self._start[1])
        if self._opened is not None:
            count, memory = self._opened.position, self._opened.memory()
        return {"count": count, "memory": memory, "ended": self._ended}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a place at the next `iter`."""
        self._start, self._opened = (state["count"], state["memory"]), None
        self._ended = state["ended"]


def _collate_share(
    collate: Collate, num_parts: int, samples: list[Any]
) -> tuple[int, list[Any]]:
    """Return the number of samples of a share, and its collated micro-batches."""
    spans = [even_part((0, len(samples)), i, num_parts) for i in range(num_parts)]
    return len(samples), _collate_spans(collate, samples, spans)


@attrs.frozen(eq=False)
class Sharded:
    """A rank's own stream.

    Attributes:
        data: the stream, and how to read it.
        seed: the seed of random numbers.
        ranks: the ranks that stay in step.
        place: the rank and update of the first batch, for errors.
    """

    data: "Data"
    seed: int
    ranks: World
    place: Place

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
        batch = (0, self.data.global_batch_size)
        begin, end = even_part(batch, plan.world_rank, plan.world_size)
        num_parts = len(plan.parts(batch))
        collate = partial(
            _collate_share, self.data.collate or default_collate, num_parts
        )
        loader = self._loader(max(1, end - begin), collate, start)
        items = self._items(loader, start, update)
        item, cursor = next(items, None), start
        values: list[Any] = []
        last_indices: tuple[Any, ...] = ()
        while True:
            count, memory = 0, cursor.memory
            if item is not None:
                count, values = item
                memory = self._memory(loader)
                item = next(items, None)
            elif not values and cursor.samples:  # resumed at the end of its samples
                first = Opened(
                    self.data.dataset,
                    self._key(start.epoch),
                    Cursor(start.epoch),
                    self.data.first,
                )
                values = collate(first.read())[1]
            counts, has_more = self._gather_counts(count, has_more=item is not None)
            self._check_first(counts, cursor)
            total, low = sum(counts), cursor.samples + sum(counts[: self.ranks.rank])
            after = Cursor(start.epoch + 1, 0)
            if has_more:
                after = Cursor(start.epoch, cursor.samples + total, memory=memory)
            spans = tuple(
                even_part((low, low + count), i, num_parts) for i in range(num_parts)
            )
            indices = tuple(np.arange(i, max(j, i + 1)) for i, j in spans)
            if count:
                last_indices = indices
            indices = last_indices or indices  # a stand-in is the last batch
            micro_plan = Plan(num_micro_batches=num_parts)
            shares = [micro_plan.counts(n)[0] for n in counts]
            num_own = low + count
            yield (
                Portion(cursor, after, total, spans, indices, num_own, 0, shares),
                values,
            )
            if not has_more:
                return
            cursor = after

    def _items(self, loader: Any, start: Cursor, update: int) -> Iterator[Any]:
        """Yield the loader's items."""
        if not self.data.num_workers:
            yield from loader
            return
        num_read = 0

        def due() -> tuple[int, str]:
            stream = f"rank {self.ranks.rank}'s own stream, in epoch {start.epoch}"
            return num_read, f"Being read was {stream}."

        items = watch_workers(
            loader,
            timeout=self.data.timeout,
            place=attrs.evolve(self.place, update=update),
            due=due,
        )
        for num_read, item in enumerate(items, 1):  # noqa: B007 - `due` reads it
            yield item

    def _loader(self, share: int, collate: Collate, start: Cursor) -> Any:
        # costs as much to import as all of accelfn
        from torchdata.stateful_dataloader import (  # noqa: PLC0415
            StatefulDataLoader,
        )

        key, num_workers = self._key(start.epoch), self.data.num_workers
        with mute_worker_warnings():
            # torchdata calls a function that torch has deprecated
            warnings.filterwarnings("ignore", "'set_vital' is deprecated")
            loader = StatefulDataLoader(
                Counted(self.data, key, start.epoch),
                batch_size=share,
                num_workers=num_workers,
                collate_fn=collate,
                timeout=self.data.timeout if num_workers else 0,
                multiprocessing_context=start_method(num_workers),
                generator=torch.Generator().manual_seed(key),
            )
        if start.memory is not None:
            before = start.memory["num_workers"]
            if before != num_workers:
                msg = (
                    f"This stream was read by {before} workers a rank, each of a different part,"
                    f" and cannot resume with {num_workers}."
                )
                raise DataError(msg)
            loader.load_state_dict(copy.deepcopy(start.memory["loader"]))
        return loader

    def _key(self, epoch: int) -> int:
        return draws.key(self.seed, "data", epoch, "rank", self.ranks.rank)

    def _memory(self, loader: Any) -> dict[str, Any]:
        state = copy.deepcopy(loader.state_dict())
        return {"num_workers": self.data.num_workers, "loader": state}

    def _gather_counts(self, count: int, *, has_more: bool) -> tuple[list[int], bool]:
        """Return the number of samples of each rank, and whether any rank has more."""
        own_counts = torch.tensor([count, has_more], device=self.ranks.device)
        rows = [
            t.tolist()
            for t in all_gather_list(own_counts, self.ranks, label="lockstep")
        ]
        return [row[0] for row in rows], any(row[1] for row in rows)

    def _check_first(self, counts: list[int], cursor: Cursor) -> None:
        if cursor.samples or all(counts):
            return
        msg = (
            f"af.Data(sharded=True): rank {counts.index(0)} of {self.ranks.size} got no sample"
            f" in epoch {cursor.epoch}, and so has no stand-in to take part with. Samples by"
            f" rank in the first update: {counts}."
        )
        raise DataError(msg)


# Dispatch: rank 0 reads a stream for all ranks, and sends each rank its share.
#
# For streams that only one process can read: a socket, a queue, a database's cursor.
# Tensors and plain data travel; nothing is pickled.


_LABEL = "dispatch of data"


def read_dispatched(
    stream: Stream, plan: Plan, start: Cursor, epochs: int | None, world: World
) -> Iterator[tuple[Portion, list[Any]]]:
    """Yield this rank's portions, which rank 0 reads for all ranks.

    Ranks that share a batch, along "cp" and "tp", get it from the first of them.

    Raises:
        DataError: on every rank, if rank 0 could not read.
    """
    ranks, sharers = world.batch, world.along("cp", "tp")
    updates = None
    if world.is_main:
        plans = [_plan_of_rank(plan, rank) for rank in range(ranks.size)]
        updates = stream.portions(plans, start, epochs)
    while epochs is None or start.epoch < epochs:
        failure, payloads = None, None
        if updates is not None:
            try:
                cuts, samples = next(updates)
                payloads = [
                    codec.to_bytes(_encode_portion(part, stream.values(part, samples)))
                    for part in cuts
                ]
            except Exception as error:  # noqa: BLE001 - the other ranks must know
                failure = error
                text = f"{type(error).__name__}: {error}"
                payloads = [codec.to_bytes({"failed": text})] * ranks.size
        copies = None
        if sharers.is_main:
            copies = [scatter_bytes(payloads, ranks, label=_LABEL)] * sharers.size
        batch = codec.from_bytes(scatter_bytes(copies, sharers, label=_LABEL))
        if failure is not None:
            raise failure
        if "failed" in batch:
            msg = f"Rank 0, which reads for all, could not: {batch['failed']}"
            raise DataError(msg)
        values = batch.pop("values")
        portion = _decode_portion(batch)
        yield portion, values
        start = portion.after


def _plan_of_rank(plan: Plan, rank: int) -> Plan:
    share = rank if plan.num_shares > 1 else plan.rank
    return attrs.evolve(plan, world_rank=rank, rank=share)


def _encode_portion(portion: Portion, values: list[Any]) -> dict[str, Any]:
    return portion._asdict() | {
        "start": portion.start.to_plain(),
        "after": portion.after.to_plain(),
        "spans": [list(span) for span in portion.spans],
        "indices": [indices.tolist() for indices in portion.indices],
        "values": values,
    }


def _decode_portion(fields: dict[str, Any]) -> Portion:
    return Portion(**fields)._replace(
        start=Cursor(*fields["start"]),
        after=Cursor(*fields["after"]),
        spans=tuple((begin, stop) for begin, stop in fields["spans"]),
        indices=tuple(np.array(row, np.int64) for row in fields["indices"]),
    )


# `join_uneven`: streams of unequal length, one per rank, without a rank that waits forever.


_ENDS = ("last", "first", "together")


def join_uneven(
    iterable: Iterable[Any],
    world: World,
    *,
    ends: Literal["last", "first", "together"] = "last",
) -> Iterator[Batch]:
    """Yield this rank's own batches, the same number on every rank.

    Use it if each rank reads its own samples: a step over `af.batches` needs no lockstep. You
    can give the batches to a step, which does not move the state's cursor. A list is a rank's
    micro-batches, but a list from a DataLoader is one batch.

    Args:
        iterable: this rank's batches; ranks may have different numbers of batches.
        world: the ranks that go together; ranks that share a batch ("cp", "tp") give the same.
        ends: "last": when all ranks have ended; a rank that has ended takes part with its last
            batch, with weight 0. "first": as soon as one rank has ended. "together": all
            ranks must end at once.

    Yields:
        Batches; `weights` of 0 mark batches that do not count.

    Law: with "last", the mean is over the samples of all ranks.

    Cost: one all-gather of an integer for each batch; with "last", the last batch is kept.

    Raises:
        DataError: ranks ended at different batches, and `ends="together"`; or a rank has no
            batch at all as a stand-in, and `ends="last"`.
        BatchError: a list of micro-batches is empty.
        ArgumentError: `ends` is another word, or you cannot iterate over the first argument.
    """
    if ends not in _ENDS:
        choices = ", ".join(map(repr, _ENDS))
        msg = f"af.join_uneven(ends={ends!r}): expected one of {choices}."
        raise ArgumentError(msg)
    check_world("af.join_uneven", world)
    if not isinstance(iterable, Iterable):
        msg = (
            f"af.join_uneven({type(iterable).__name__}): expected this rank's batches, as an"
            " iterable; an empty list if it has no batch."
        )
        raise ArgumentError(msg)
    batches = iter(iterable)
    if isinstance(iterable, DataLoader):
        # a loader makes a list of samples that are tuples
        batches = ([batch] for batch in batches)
    return _equal_batches(batches, world.batch, ends)


def _equal_batches(items: Iterator[Any], ranks: World, ends: str) -> Iterator[Batch]:
    number, last, end = 0, None, object()
    while True:
        item = next(items, end)
        last = last if item is end else item
        own_flag = torch.tensor([int(item is not end)], device=ranks.device)
        flags = [
            bool(flag) for flag in all_gather_list(own_flag, ranks, label="lockstep")
        ]
        if not any(flags) or (ends == "first" and not all(flags)):
            return
        without = [rank for rank, has_batch in enumerate(flags) if not has_batch]
        if without and ends == "together":
            msg = (
                f"af.join_uneven: rank {without[0]} ran out at batch {number}, others have"
                f" {number + 1} or more. Give every rank as many, or choose what to do with"
                ' the rest by ends="last" or ends="first".'
            )
            raise DataError(msg)
        if without and number == 0:
            msg = (
                f"af.join_uneven: rank {without[0]} of {ranks.size} has no batch, and so no"
                ' stand-in with weight 0. Give it a batch, or ends="first".'
            )
            raise DataError(msg)
        if isinstance(last, list) and not last:
            msg = (
                f"af.join_uneven: batch {number} of rank {ranks.rank} is an empty list; a list is"
                " a rank's micro-batches, at least one. Leave the batch out."
            )
            raise BatchError(msg)
        yield _lockstep_batch(last, flags, ranks.rank)
        number += 1


def _lockstep_batch(item: Any, flags: list[bool], rank: int) -> Batch:
    values = tuple(item) if isinstance(item, list) else (item,)
    count, counts = len(values), flags[rank]
    return Batch(
        micro_batches=values,
        weights=(None if counts else 0,) * count,
        start=None,
        cursor=None,
        num_samples=0,
        parts_indices=(np.empty(0, np.int64),) * count,
        parts_filler=(not counts,) * count,
        shares=partial(list, [[None if flag else 0] * count for flag in flags]),
    )
