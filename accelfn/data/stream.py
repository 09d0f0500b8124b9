# SPDX-License-Identifier: Apache-2.0
"""Streams: datasets that are read from front to back, and cannot be asked by index.

Every process reads the whole stream and keeps the samples at its own positions, so the order
does not depend on ranks or workers, and no sample is seen twice. Where the stream stands is
what its own `state_dict()` says; that travels with each batch.
"""

import copy
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from weakref import WeakValueDictionary

import attrs
import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from accelfn.base import draws
from accelfn.data.cursor import Cursor
from accelfn.data.cut import Span
from accelfn.data.epoch import Portion
from accelfn.data.fetch import Collate
from accelfn.data.length import promised_length
from accelfn.data.plan import Plan
from accelfn.errors import DataError

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
