# SPDX-License-Identifier: Apache-2.0
"""Read the batches of a rank, by index or from a stream: a dataset that is read in order.

Every process reads the whole stream, and keeps only the samples at its own positions. So the
order does not depend on ranks or workers, and no sample is used twice. Each batch carries the
stream's `state_dict()`, so that reading can resume after the batch.
"""

import copy
import logging
import warnings
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias
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
from accelfn.base.codec import has_state
from accelfn.collectives.failures import check_world
from accelfn.collectives.packed import all_gather_list, scatter_bytes
from accelfn.data import loaders
from accelfn.data.loaders import Collate, Reading
from accelfn.data.order import promised_length, seed_generators
from accelfn.data.plan import (
    Batch,
    Cursor,
    Filler,
    Pair,
    Plan,
    Portion,
    Span,
    even_part,
)
from accelfn.errors import ArgumentError, BatchError, DataError
from accelfn.world import World

if TYPE_CHECKING:
    from accelfn.data.dataset import Data

_LOG = logging.getLogger("accelfn")
_BEFORE = -1
"""A position for the random numbers that a stream uses before its first sample."""


def read_batches(data: "Data", reading: Reading) -> Iterator[Batch]:
    """Yield the batches of this rank on its device.

    Torch modes of the caller, such as inference mode, do not apply while the dataset is read.
    """
    device = reading.world.device
    batches = _assemble_batches(
        loaders.on_device(_pairs_of(data, reading), device), reading.plan
    )
    while True:
        if draws.is_plain():
            batch = next(batches, None)
        else:  # a step cannot use a tensor that was created in inference mode
            with draws.own_modes(device), draws.span("accelfn data"):
                batch = next(batches, None)
        if batch is None:
            return
        yield batch


def _pairs_of(data: "Data", reading: Reading) -> Iterator[Pair]:
    """Yield this rank's portion of each update, with its values on the CPU."""
    start, world = reading.start, reading.world
    if world.is_main:
        loaders.advise_of_workers(data.num_workers)
    if not data.is_stream:
        return loaders.read_by_index(data, reading)
    if data.sharded:
        return read_sharded(data, reading)
    if start.samples and start.memory is None and world.is_main:
        log_replay(data.dataset, start.samples)
    stream = Stream(data, reading.seed, reading.plan, start, reading.epochs)
    if data.dispatch:
        return read_dispatched(stream, world)
    return _read_in_workers(stream, reading) if data.num_workers else iter(stream)


def _assemble_batches(pairs: Iterable[Pair], plan: Plan) -> Iterator[Batch]:
    """Yield a `Batch` for each portion; samples that do not count are marked as filler."""
    for portion, values in pairs:
        start, after, num_samples, spans, indices, num_own, _, shares = portion
        weights = tuple([high - low for low, high in spans])
        # positions after the end of the epoch repeat samples of the epoch's start
        filler: list[Filler] = [
            low == high or (high > num_own and np.arange(low, high) >= num_own)
            for low, high in spans
        ]
        yield Batch(
            micro_batches=tuple(values),
            weights=weights,
            start=start,
            cursor=after,
            num_samples=num_samples,
            parts_indices=indices,
            parts_filler=tuple(filler),
            shares=partial(plan.counts, num_samples)
            if shares is None
            else partial(list, shares),
        )


# Streams.


def check_promise(dataset: Any, count: int, epoch: int, *, ended: bool) -> None:
    """Compare the number of samples that a stream has yielded with its `__len__`, if any.

    Args:
        dataset: the stream.
        count: the number of samples so far.
        epoch: the number of the epoch, for errors.
        ended: whether the stream has ended.

    Raises:
        DataError: the stream has yielded more samples than its length, or has ended with fewer.
    """
    length = promised_length(dataset)
    if length is None or count == length or (count < length and not ended):
        return
    wrong_by = "only " if count < length else "at least "
    kind = type(dataset).__name__
    amount = f"{wrong_by}{count} samples in epoch {epoch}"
    advice = "Let its __len__ return the number of samples, or remove __len__"
    msg = f"{kind} has the length {length}, but yielded {amount}. {advice}."
    raise DataError(msg)


def log_replay(dataset: Any, count: int) -> None:
    """Log a warning that the first samples are read again."""
    kind = type(dataset).__name__
    _LOG.warning("Reading the first %d samples of %s again, to resume.", count, kind)


def dropped_error(data: "Data", count: int) -> DataError:
    """Return the error to raise if an epoch has fewer samples than a batch."""
    kind, size = type(data.dataset).__name__, data.global_batch_size
    return DataError(
        f'af.Data(global_batch_size={size}, remainder="drop"): {kind} has {count} samples, so every'
        " batch would be dropped. Use a smaller global_batch_size."
    )


def resume_error(dataset: Any, cursor: Cursor) -> DataError:
    """Return the error to raise if a stream cannot resume at a cursor."""
    kind = type(dataset).__name__
    place = f"sample {cursor.samples} of epoch {cursor.epoch}"
    replay = f"af.Data(..., replay=True), which reads {cursor.samples} samples again."
    if has_state(dataset):
        return DataError(
            f"The cursor at {place} has no state of the stream {kind}: it is from af.seek, or"
            " the samples in a shuffle buffer of `datasets` could not be saved. Use the cursor"
            f" of a batch or of a loaded state, shuffle without a buffer, or write {replay}"
        )
    return DataError(
        f"{kind} is a stream without a state, so it cannot resume at {place}. Add state_dict()"
        f" and load_state_dict() to it, or write {replay}"
    )


def _is_lossy(dataset: Any) -> bool:
    """Return whether a stream of the library `datasets` has a shuffle buffer.

    Its state does not include the samples in the buffer.
    """
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

    Three kinds of streams are special. For a DataLoader, the result is None: its `state_dict`
    would start the workers, and each of its epochs starts from the beginning anyway. The same
    holds for torchdata.nodes, which ignore `load_state_dict` after a call of `state_dict`. A
    stream of `datasets` would return the position of its newest iterator, so accelfn reads the
    state that the user has loaded, if any.
    """
    if hasattr(dataset, "_starting_state_dict"):
        return copy.deepcopy(dataset._starting_state_dict) or {}
    is_nodes = type(dataset).__module__.startswith("torchdata.nodes")
    if not has_state(dataset) or isinstance(dataset, DataLoader) or is_nodes:
        return None
    try:
        return copy.deepcopy(dataset.state_dict())
    except Exception:  # noqa: BLE001 - some streams have a state only once they are read
        return None


_READERS: "WeakValueDictionary[int, Opened]" = WeakValueDictionary()
"""The newest reader of each stream, by the stream's id: only one reader can use its state."""


class Opened:
    """Reads one epoch of a stream from a cursor on, sample by sample.

    accelfn seeds the default random generators for each sample from (seed, epoch, position).
    """

    def __init__(self, data: "Data", key: int, start: Cursor) -> None:
        """Start the epoch, and continue to the cursor.

        Without a state in the cursor, the epoch starts from the stream's state before it was
        read, even if another loop has read from the stream.

        Args:
            data: the data record, with the stream.
            key: the key of the epoch's random numbers.
            start: the cursor.
        """
        dataset: Any = data.dataset
        self.position = start.samples
        self._dataset, self._key, self._epoch = dataset, key, start.epoch
        if start.memory is None and data.first is not None:
            dataset.load_state_dict(copy.deepcopy(data.first))
        if callable(getattr(dataset, "set_epoch", None)):
            dataset.set_epoch(start.epoch)
        seed_generators(dataset, key)
        memory = copy.deepcopy(start.memory)
        self._stateful: Any = dataset if has_state(dataset) else None
        with draws.seeded() as drawing:
            drawing.begin(draws.fold(key, _BEFORE))
            if memory is not None and self._stateful is not None:
                dataset.load_state_dict(memory)
            self._iterator: Any = iter(dataset)
            if memory is not None and self._stateful is None:
                self._iterator.load_state_dict(memory)
        if self._stateful is None and has_state(self._iterator):
            self._stateful = self._iterator
        _READERS[id(dataset)] = self
        if start.samples and memory is None:
            self.position = 0
            while self.position < start.samples and self.read():
                pass

    def read(self) -> list[Any]:
        """Return the next sample in a list; an empty list at the end.

        Raises:
            DataError: another loop has started to read the stream, and uses the same state.
        """
        kind, is_newest = type(self._dataset).__name__, _READERS.get(id(self._dataset))
        if self._stateful is self._dataset and is_newest is not self:
            msg = (
                f"af.Data({kind}): another loop has started to read this stream, so this loop"
                f" cannot continue at sample {self.position} of epoch {self._epoch}: both would"
                " change the same state_dict(). Create a dataset for each state, evaluation and"
                " simulated rank, or copy.deepcopy(dataset) before it is read."
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
                    f"{kind} raised this error when accelfn read sample {self.position} of epoch"
                    f" {self._epoch}."
                )
                raise
        self.position += 1
        return [sample]

    def memory(self) -> Any:
        """Return a copy of the stream's state; None if it does not exist or is not complete."""
        if self._stateful is None or _is_lossy(self._dataset):
            return None
        return copy.deepcopy(self._stateful.state_dict())


def _collate_spans(
    collate: Collate, samples: Sequence[Any], spans: Iterable[Span], low: int = 0
) -> list[Any]:
    """Return a collated micro-batch for each span of positions.

    Args:
        collate: the collate function.
        samples: the samples at the positions from `low` on.
        spans: the positions of each micro-batch. An empty span gets one sample as filler.
        low: the position of the first sample.
    """
    values: list[Any] = []
    for begin, stop in spans:
        at = min(begin - low, len(samples) - 1)
        values.append(collate(list(samples[at : at + max(stop - begin, 1)])))
    return values


_Update: TypeAlias = tuple[Cursor, Cursor, Span, int]
"""The cursors before and after an update, the positions of its samples, and the end position of
the epoch: later positions are repeats of its start."""


@attrs.frozen(eq=False, slots=False)
class Stream(IterableDataset[Any]):
    """Cuts a stream into updates. Workers take turns: each yields every n-th update."""

    data: "Data"
    seed: int
    plan: Plan
    start: Cursor
    epochs: int | None

    def __iter__(self) -> Iterator[Pair]:
        """Read the whole stream, and yield this worker's updates."""
        # without own workers, this process may be a worker of another DataLoader
        info = get_worker_info() if self.data.num_workers else None
        if info is not None:
            # a dataset that splits itself by `get_worker_info()` must yield all samples here
            torch_worker._worker_info = None  # pyright: ignore[reportPrivateUsage]
        number, count = (0, 1) if info is None else (info.id, info.num_workers)
        for i, (update, samples) in enumerate(self.updates()):
            if i % count == number:
                yield self.share_of(self.plan, update, samples)

    def updates(self) -> Iterator[tuple[_Update, list[Any]]]:
        """Yield each update with all its samples."""
        start = self.start
        while self.epochs is None or start.epoch < self.epochs:
            yield from self._epoch(start)
            start = Cursor(start.epoch + 1)

    def share_of(self, plan: Plan, update: _Update, samples: Sequence[Any]) -> Pair:
        """Return the portion of a plan's rank, with its collated micro-batches."""
        portion = _portion(plan, *update)
        collate, low = self.data.collate or default_collate, portion.start.samples
        return portion, _collate_spans(collate, samples, portion.spans, low)

    def _open(self, start: Cursor) -> Opened:
        return Opened(self.data, draws.key(self.seed, "data", start.epoch), start)

    def _epoch(self, start: Cursor) -> Iterator[tuple[_Update, list[Any]]]:
        size, drop = self.data.global_batch_size, self.data.remainder == "drop"
        # read ahead, to know whether a batch is the last one before it is yielded
        need = 2 * size if drop else size + 1
        source = self._open(start)
        before, samples, memories = start, list[Any](), dict[int, Any]()
        head: list[Any] | None = None if start.samples else []
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
            end = before.samples + len(batch)
            after = Cursor(start.epoch + 1)
            if not is_last:
                after = Cursor(start.epoch, end, memory=memories.pop(end))
            elif self.data.remainder == "pad":
                batch += self._repeats(head, size - len(batch), start.epoch)
            span = (before.samples, before.samples + len(batch))
            yield (before, after, span, end), batch
            if is_last:
                return
            before = after

    def _repeats(self, head: list[Any] | None, count: int, epoch: int) -> list[Any]:
        """Return samples to pad a batch with: the first samples of the epoch, cyclically.

        After a resume, `head` is None, and the first samples are read again.
        """
        if count and head is None:
            source = self._open(Cursor(epoch))
            head = []
            while len(head) < self.data.global_batch_size and (more := source.read()):
                head += more
        return [head[i % len(head)] for i in range(count)] if head else []

    def _raise_empty(self, start: Cursor, count: int) -> None:
        kind = type(self.data.dataset).__name__
        if start.samples:
            place = f"sample {start.samples} of epoch {start.epoch}"
            msg = f"{kind} has no more samples at {place}, to resume there. Was the stream changed?"
        elif count:
            raise dropped_error(self.data, count)
        else:
            why = (
                "It is empty, or can be read only once, like an iterator. Pass an object that"
                " starts from its first sample at each call of __iter__."
            )
            if self.data.first:
                why = (
                    "It is empty, or had been read to its end before you passed it to af.Data,"
                    " and each epoch starts from that state. Pass a dataset that was not read."
                )
            msg = f"{kind} yielded no sample in epoch {start.epoch}. {why}"
        raise DataError(msg)


def _portion(
    plan: Plan, start: Cursor, after: Cursor, span: Span, num_own: int
) -> Portion:
    """Return the portion of an update for a plan's rank.

    Args:
        plan: the plan of the rank.
        start: the cursor before the update.
        after: the cursor after the update.
        span: the positions of the update's samples.
        num_own: the end position of the epoch; later positions are repeats of its start.
    """
    spans = tuple(plan.parts(span))
    firsts = [min(begin, span[1] - 1) for begin, _ in spans]
    indices = tuple(
        np.arange(first, max(stop, first + 1))
        % num_own  # repeats are samples of the epoch's start
        for first, (_, stop) in zip(firsts, spans, strict=True)
    )
    return Portion(start, after, span[1] - span[0], spans, indices, num_own, key=0)


def _read_in_workers(stream: Stream, reading: Reading) -> Iterator[Pair]:
    """Read a stream in worker processes, which take turns: each reads every n-th update.

    Raises:
        DataError: a worker was killed or did not answer.
    """
    num_read, after = 0, reading.start

    def due() -> tuple[int, str]:
        place = f"sample {after.samples} of epoch {after.epoch}"
        return num_read, f"The workers were reading the stream from {place} on."

    for portion, values in loaders.watch(stream, stream.data, reading, due):
        num_read, after = num_read + 1, portion.after
        yield portion, values


# `sharded=True`: streams with different samples on each rank, which torchdata reads.
#
# Ranks may have different numbers of samples, so they exchange the numbers at each update. A
# rank without a sample left continues with filler until all ranks have ended.


class Counted(IterableDataset[Any]):
    """The stream of a rank in one worker, which counts its samples.

    torchdata saves and restores its state in each worker.
    """

    def __init__(self, data: "Data", key: int, epoch: int) -> None:
        """Initialize with the data record, the key of random numbers, and the epoch."""
        self._data, self._key, self._epoch = data, key, epoch
        self._opened: Opened | None = None
        self._state: dict[str, Any] = {"count": 0, "memory": None, "ended": False}

    def __iter__(self) -> Iterator[Any]:
        """Yield the samples of the epoch that were not read yet."""
        state = self._state
        if state["ended"]:
            return
        info, dataset = get_worker_info(), self._data.dataset
        key = draws.fold(self._key, 0 if info is None else info.id)
        start = Cursor(self._epoch, state["count"], memory=state["memory"])
        if start.samples and start.memory is None:
            if not self._data.replay:
                raise resume_error(dataset, start)
            if info is None or info.id == 0:
                log_replay(dataset, start.samples)
        source = self._opened = Opened(self._data, key, start)
        while not state["ended"]:
            samples = source.read()
            state["ended"] = not samples
            if info is None:  # a worker may have only some of the samples
                count = source.position
                check_promise(dataset, count, self._epoch, ended=not samples)
            yield from samples

    def state_dict(self) -> dict[str, Any]:
        """Return the current position, with the stream's state."""
        source = self._opened
        if source is not None:
            self._state |= {"count": source.position, "memory": source.memory()}
        return copy.deepcopy(self._state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next `iter` continue from a position."""
        self._state, self._opened = dict(state), None


def _collate_share(
    collate: Collate, plan: Plan, samples: list[Any]
) -> tuple[int, list[Any]]:
    """Return the number of samples in a share, and its collated micro-batches."""
    spans = plan.parts((0, len(samples)))
    return len(samples), _collate_spans(collate, samples, spans)


def read_sharded(data: "Data", reading: Reading) -> Iterator[Pair]:
    """Yield this rank's portion of each update, read from this rank's stream."""
    while reading.epochs is None or reading.start.epoch < reading.epochs:
        update = reading.update
        for pair in Sharded(data, reading).epoch():
            yield pair
            update += 1
        start = Cursor(reading.start.epoch + 1)
        reading = attrs.evolve(reading, start=start, update=update)


@attrs.frozen(eq=False)
class Sharded:
    """Reads an epoch of this rank's own stream, with as many updates as all other ranks."""

    data: "Data"
    reading: Reading

    @property
    def ranks(self) -> World:
        """The ranks that stay in step."""
        return self.reading.world.batch

    def epoch(self) -> Iterator[Pair]:
        """Yield this rank's portion of each update, with its values."""
        plan, start = self.reading.plan, self.reading.start
        batch = (0, self.data.global_batch_size)
        begin, end = even_part(batch, plan.world_rank, plan.world_size)
        plan = Plan(num_micro_batches=len(plan.parts(batch)))
        collate = partial(_collate_share, self.data.collate or default_collate, plan)
        loader = self._loader(max(1, end - begin), collate)
        items = self._items(loader)
        item, before = next(items, None), start
        values: list[Any] = []
        last_indices: tuple[Any, ...] = ()
        while True:
            count, memory = 0, before.memory
            if item is not None:
                count, values = item
                state = copy.deepcopy(loader.state_dict())
                memory = {"num_workers": self.data.num_workers, "loader": state}
                item = next(items, None)
            elif not values and before.samples:  # resumed after this rank's last sample
                first = Opened(self.data, self._key(), Cursor(start.epoch))
                values = collate(first.read())[1]
            rows = _gather(self.ranks, count, item is not None)
            counts, has_more = [n for n, _ in rows], any(more for _, more in rows)
            if not before.samples and not all(counts):
                msg = (
                    f"af.Data(sharded=True): rank {counts.index(0)} of {len(counts)} has no sample"
                    f" in epoch {start.epoch}, but every rank needs at least one. Samples of each"
                    f" rank in the first update: {counts}."
                )
                raise DataError(msg)
            total, low = sum(counts), before.samples + sum(counts[: self.ranks.rank])
            after = Cursor(start.epoch + 1)
            if has_more:
                after = Cursor(start.epoch, before.samples + total, memory=memory)
            portion = _portion(plan, before, after, (low, low + count), low + count)
            # a rank that has ended repeats its last batch
            last_indices = (
                last_indices if last_indices and not count else portion.indices
            )
            shares = [plan.counts(n)[0] for n in counts]
            portion = portion._replace(
                num_samples=total, indices=last_indices, shares=shares
            )
            yield portion, values
            if not has_more:
                return
            before = after

    def _items(self, loader: Any) -> Iterator[Any]:
        """Yield the items of a loader; explain errors of its workers."""
        if not self.data.num_workers:
            yield from loader
            return
        num_read = 0

        def due() -> tuple[int, str]:
            epoch = self.reading.start.epoch
            stream = f"rank {self.ranks.rank}'s own stream, in epoch {epoch}"
            return num_read, f"The workers were reading {stream}."

        items = loaders.watch_workers(loader, self.reading, due)
        for num_read, item in enumerate(items, 1):  # noqa: B007 - `due` uses num_read
            yield item

    def _loader(self, share: int, collate: Collate) -> Any:
        # this import takes as long as the import of all of accelfn
        from torchdata.stateful_dataloader import (  # noqa: PLC0415
            StatefulDataLoader,
        )

        start, num_workers = self.reading.start, self.data.num_workers
        with loaders.mute_worker_warnings():
            # torchdata calls a function that torch has deprecated
            warnings.filterwarnings("ignore", "'set_vital' is deprecated")
            loader = StatefulDataLoader(
                Counted(self.data, self._key(), start.epoch),
                batch_size=share,
                collate_fn=collate,
                generator=torch.Generator().manual_seed(self._key()),
                **loaders.worker_options(self.data),
            )
        if start.memory is not None:
            before = start.memory["num_workers"]
            if before != num_workers:
                reason = f"{before} workers per rank read parts of this stream"
                advice = f"Write af.Data(..., num_workers={before})"
                msg = f"Before the resume, {reason}. It cannot resume with {num_workers}. {advice}."
                raise DataError(msg)
            loader.load_state_dict(copy.deepcopy(start.memory["loader"]))
        return loader

    def _key(self) -> int:
        seed, epoch = self.reading.seed, self.reading.start.epoch
        return draws.key(seed, "data", epoch, "rank", self.ranks.rank)


# `dispatch=True`: rank 0 reads a stream for all ranks, and sends each rank its share.
#
# Only one process can read some streams, such as a socket, a queue or a database's cursor.
# Samples can have tensors and plain data, because nothing is pickled.


_LABEL = "dispatch of data"


def read_dispatched(stream: Stream, world: World) -> Iterator[Pair]:
    """Yield this rank's portions with their values, which rank 0 reads for all ranks.

    Ranks along "cp" and "tp" share a batch. The first of these ranks receives the batch, and
    sends it to the others.

    Raises:
        DataError: on all ranks except rank 0, if rank 0 could not read. Rank 0 raises its own
            error.
    """
    ranks, sharers = world.batch, world.along("cp", "tp")
    plans = [_plan_of_rank(stream.plan, rank) for rank in range(ranks.size)]
    updates = stream.updates() if world.is_main else None
    start = stream.start
    while stream.epochs is None or start.epoch < stream.epochs:
        failure, payloads = None, None
        if updates is not None:
            try:
                update, samples = next(updates)
                cuts = [stream.share_of(plan, update, samples)[1] for plan in plans]
                head = [update[1].to_plain(), *update[2:]]
                payloads = [codec.to_bytes([*head, values]) for values in cuts]
            except Exception as error:  # noqa: BLE001 - reported to the other ranks
                failure = error
                text = f"{type(error).__name__}: {error}"
                payloads = [codec.to_bytes(text)] * ranks.size
        copies = None
        if sharers.is_main:
            copies = [scatter_bytes(payloads, ranks, label=_LABEL)] * sharers.size
        message = codec.from_bytes(scatter_bytes(copies, sharers, label=_LABEL))
        if failure is not None:
            raise failure
        if isinstance(message, str):
            msg = f"Rank 0, which reads the data for all ranks, failed: {message}"
            raise DataError(msg)
        plain, span, end, values = message
        after = Cursor(*plain)
        yield _portion(plans[ranks.rank], start, after, span, end), values
        start = after


def _plan_of_rank(plan: Plan, rank: int) -> Plan:
    share = rank if plan.num_shares > 1 else plan.rank
    return attrs.evolve(plan, world_rank=rank, rank=share)


# `join_uneven`: ranks have unequal numbers of batches, and no rank waits forever.


_ENDS = ("last", "first", "together")


def join_uneven(
    iterable: Iterable[Any],
    world: World,
    *,
    ends: Literal["last", "first", "together"] = "last",
) -> Iterator[Batch]:
    """Yield this rank's own batches, but the same number of batches on every rank.

    Use this function if each rank reads its own samples. (You do not need it with `af.batches`.)
    You can pass the batches to a step, which then does not move the state's cursor. A list is
    read as the micro-batches of one batch. A list from a DataLoader is one micro-batch.

    Args:
        iterable: this rank's batches. Ranks may have different numbers of batches.
        world: the ranks that stay in step. Ranks that share a batch, along "cp" and "tp", must
            pass equal batches.
        ends: when to end. "last": when all ranks have no batch left. Until then, a rank without
            a batch repeats its last batch with weight 0. "first": as soon as one rank has no
            batch left. "together": all ranks must have the same number of batches.

    Yields:
        Batches. If the `weights` of a batch are 0, the batch does not count.

    Law: with "last", means are over the samples of all ranks.

    Cost: an all-gather of an integer for each batch. With "last", each rank keeps its last batch.

    Raises:
        DataError: with `ends="together"`, ranks have different numbers of batches. With
            `ends="last"`, a rank has no batch to repeat.
        BatchError: a list of micro-batches is empty.
        ArgumentError: `ends` is not one of these words, or `iterable` is not an iterable.
    """
    if ends not in _ENDS:
        choices = ", ".join(map(repr, _ENDS))
        msg = f"af.join_uneven(ends={ends!r}): expected one of {choices}."
        raise ArgumentError(msg)
    check_world("af.join_uneven", world)
    if not isinstance(iterable, Iterable):
        needs = "this rank's batches in an iterable, which may be an empty list"
        msg = f"af.join_uneven({type(iterable).__name__}): expected {needs}."
        raise ArgumentError(msg)
    batches = iter(iterable)
    if isinstance(iterable, DataLoader):
        # a DataLoader may yield a list as one batch: do not read it as a list of micro-batches
        batches = ([batch] for batch in batches)
    return _equal_batches(batches, world.batch, ends)


def _gather(ranks: World, *numbers: int) -> list[list[int]]:
    """Return the numbers of each rank."""
    row = torch.tensor([*map(int, numbers)], device=ranks.device)
    return [row.tolist() for row in all_gather_list(row, ranks, label="lockstep")]


def _equal_batches(items: Iterator[Any], ranks: World, ends: str) -> Iterator[Batch]:
    number, last, end = 0, None, object()
    while True:
        item = next(items, end)
        last = last if item is end else item
        flags = [bool(flag) for (flag,) in _gather(ranks, item is not end)]
        if not any(flags) or (ends == "first" and not all(flags)):
            return
        without = [rank for rank, has_batch in enumerate(flags) if not has_batch]
        if without and ends == "together":
            counts = f"{number} batches, but other ranks have {number + 1} or more"
            advice = 'Give all ranks the same number, or pass ends="last" or "first"'
            msg = f"af.join_uneven: rank {without[0]} has {counts}. {advice}."
            raise DataError(msg)
        if without and number == 0:
            reason = "to repeat, while other ranks have more batches"
            advice = 'Give it a batch, or pass ends="first"'
            rank = f"rank {without[0]} of {ranks.size}"
            msg = f"af.join_uneven: {rank} has no batch {reason}. {advice}."
            raise DataError(msg)
        if isinstance(last, list) and not last:
            batch = f"batch {number} of rank {ranks.rank} is an empty list"
            msg = f"af.join_uneven: {batch}, but a list must have a micro-batch. Leave it out."
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
