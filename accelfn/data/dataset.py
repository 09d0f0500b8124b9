# SPDX-License-Identifier: Apache-2.0
"""`Data`: a dataset and the way training draws from it, as a value."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, Self, cast

import attrs
import numpy as np
from torch.utils.data import DataLoader

from accelfn import streams
from accelfn.cursor import Cursor
from accelfn.data.batch import Batch
from accelfn.data.budget import budget
from accelfn.data.cut import REMAINDERS, Cut, EvenCut, UnevenCut
from accelfn.data.device import on_device
from accelfn.data.epoch import Epoch
from accelfn.data.fetch import Collate
from accelfn.data.fingerprint import fingerprint_of
from accelfn.data.loader import options_of
from accelfn.data.orders import (
    Mixed,
    Order,
    OrderFunction,
    Own,
    Sequential,
    Shuffled,
    Side,
    checked,
    drawn_once,
    refuse_distributed,
)
from accelfn.data.read import assembled
from accelfn.data.reading import Reading, pairs_of
from accelfn.data.sources import Joined, Source, Zipped, source_of
from accelfn.data.stream import first_state, is_stream, promised_length, stateless
from accelfn.errors import ArgumentError, BatchError, DataError, LengthError


def _is_batch_size(_owner: object, _field: object, value: object) -> None:
    if value is None or isinstance(value, budget):
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        msg = (
            f"af.Data(batch_size={value!r}): expected an integer of at least 1, or"
            " af.budget(costs, limit=...)."
        )
        raise ArgumentError(msg)


def _is_remainder(_owner: object, _field: object, value: object) -> None:
    if value not in REMAINDERS:
        msg = (
            f"af.Data(remainder={value!r}): expected one of"
            f" {', '.join(map(repr, REMAINDERS))}."
        )
        raise ArgumentError(msg)


def _is_num_workers(_owner: object, _field: object, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        msg = (
            f"af.Data(num_workers={value!r}): expected a number of processes, 0 or"
            " more."
        )
        raise ArgumentError(msg)


def _is_duration(_owner: object, _field: object, value: object) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 < cast("float", value) < float("inf"):
        msg = (
            f"af.Data(timeout={value!r}): expected a finite number of seconds above 0."
        )
        raise ArgumentError(msg)


def _is_flag(_owner: object, field: Any, value: object) -> None:
    if not isinstance(value, bool):
        msg = f"af.Data({field.name}={value!r}): expected True or False."
        raise ArgumentError(msg)


def _is_text(_owner: object, field: Any, value: object) -> None:
    if value is not None and not isinstance(value, str):
        msg = f"af.Data({field.name}={value!r}): expected a string, or None."
        raise ArgumentError(msg)


def _flag() -> Any:
    return attrs.field(default=False, kw_only=True, validator=_is_flag)


@attrs.frozen(eq=False, repr=False)
class Data:
    """A dataset, and the order and size in which an update takes its samples.

    Attributes:
        dataset: with `__len__` and `__getitem__` (or `__getitems__`). Made of tensors (a
            tensor, a tuple or dict of them, a TensorDataset, a Subset of one), or an Arrow
            table, it is gathered a batch at a time. Or a stream: an IterableDataset, or
            anything else that can be iterated over again and again.
        batch_size: samples per update, over all ranks and micro-batches together; or
            `af.budget(...)`, so many as fit.
        shuffle: whether each epoch has an order of its own, a pure function of the state's
            seed and the epoch; the same for every number of ranks.
        remainder: what becomes of a short last batch. "short": it is split like any other,
            and its mean is over what it has. "pad": it is filled from the start of the
            epoch's order, cyclically; those repeats count in its mean, and evaluation
            leaves them out. "drop": it is left out.
        collate: makes a batch of a list of samples; default torch's.
        num_workers: processes that read ahead; 0 reads in this one.
        order: one of `af.orders`, or a user's own, `(seed, epoch, n) -> indices`.
        batch_sampler: a torch batch sampler, or anything with a length that yields lists of
            indices: each is an update. Instead of all of the above but `collate` and
            `num_workers`.
        timeout: seconds that a worker may take over a batch.
        fingerprint: what tells this dataset from others when a checkpoint is loaded; by
            default, a hash of some samples.
        sharded: a stream that gives each rank samples of its own, and each worker. Ranks
            keep in step by one small collective an update.
        dispatch: a stream that only rank 0 reads, for all.
        replay: whether a stream that has no state may be resumed by reading it again from
            the start.

    Law:
        A sample's place, and what reading it draws, depend on (seed, epoch) alone, not on
        ranks, workers or micro-batches; `sharded` data excepted.

    Raises:
        DataError: the dataset is empty, or cannot be read.
        ArgumentError: a count that is not positive, an unknown remainder, options that
            exclude each other.

    Example:
        >>> data = Data(torch.arange(10), batch_size=4)
        >>> len(data), data.updates_per_epoch
        (10, 3)
    """

    dataset: Any
    batch_size: Any = attrs.field(default=None, validator=_is_batch_size, kw_only=True)
    shuffle: bool = _flag()
    remainder: str = attrs.field(default="short", validator=_is_remainder, kw_only=True)
    collate: Collate | None = attrs.field(default=None, kw_only=True)
    num_workers: int = attrs.field(default=0, validator=_is_num_workers, kw_only=True)
    order: Order | OrderFunction | None = attrs.field(default=None, kw_only=True)
    batch_sampler: Any = attrs.field(default=None, kw_only=True)
    timeout: float = attrs.field(default=300.0, validator=_is_duration, kw_only=True)
    fingerprint: str | None = attrs.field(
        default=None, validator=_is_text, kw_only=True
    )
    sharded: bool = _flag()
    dispatch: bool = _flag()
    replay: bool = _flag()
    first: Any = attrs.field(default=None, init=False)
    """A stream's own state before it is read, with which each epoch begins."""

    def __attrs_post_init__(self) -> None:
        """Look at the dataset once, and refuse what cannot be together."""
        if self.collate is not None and not callable(self.collate):
            msg = f"af.Data(collate={self.collate!r}): expected a function."
            raise ArgumentError(msg)
        self._check_order()
        self._check_batching()
        if self.is_stream:
            self._check_stream()
            object.__setattr__(self, "first", first_state(self.dataset))
            return
        given = [name for name in _STREAMS_ONLY if getattr(self, name)]
        if given:
            msg = (
                f"af.Data({given[0]}=True): {type(self.dataset).__name__} is read by index,"
                " not a stream; leave it out."
            )
            raise ArgumentError(msg)
        if len(self.source) == 0:
            msg = f"af.Data: the dataset ({type(self.dataset).__name__}) is empty."
            raise DataError(msg)
        n = len(self)
        if isinstance(self.batch_size, budget):
            self.batch_size.check(len(self.source))
        if isinstance(self.batch_size, int) and not self.updates_per_epoch:
            msg = (
                f'af.Data(batch_size={self.batch_size}, remainder="drop"): the dataset'
                f" has {n} samples, so every batch would be dropped."
                " Take a smaller batch_size."
            )
            raise DataError(msg)

    def _check_order(self) -> None:
        order: Any = self.order
        is_uncalled = isinstance(order, type) and _is_order(order)  # orders.weighted
        if order is None or ((callable(order) or _is_order(order)) and not is_uncalled):
            return
        msg = (
            f"af.Data(order={order!r}): expected a function (seed, epoch, n) -> indices, or"
            " what one of af.orders returns. Give a torch sampler to a DataLoader, and that"
            " to af.Data.from_loader."
        )
        raise ArgumentError(msg)

    def _check_batching(self) -> None:
        if (self.batch_size is None) == (self.batch_sampler is None):
            given = "neither" if self.batch_size is None else "both"
            msg = f"af.Data: got {given}; give batch_size=, or batch_sampler= instead."
            raise ArgumentError(msg)
        if self.order is not None and self.shuffle:
            msg = (
                "af.Data(shuffle=True, order=...): an order of your own is not shuffled"
                " again. Give one of the two."
            )
            raise ArgumentError(msg)
        if self.batch_sampler is not None:
            kind = type(self.batch_sampler).__name__
            if not all(hasattr(self.batch_sampler, m) for m in ("__iter__", "__len__")):
                msg = (
                    f"af.Data(batch_sampler=...): {kind} is not iterable, or has no length;"
                    " expected lists of indices, or an object with __iter__ and __len__"
                    " that yields them."
                )
                raise ArgumentError(msg)
            refuse_distributed(self.batch_sampler)
            if self.order is not None or self.shuffle or self.remainder != "short":
                msg = (
                    "af.Data(batch_sampler=...): it says which samples come in which batch;"
                    " leave out order=, shuffle= and remainder=."
                )
                raise ArgumentError(msg)
        if isinstance(self.batch_size, budget) and self.remainder != "short":
            msg = (
                f"af.Data(batch_size=af.budget(...), remainder={self.remainder!r}): a batch"
                " is as large as it is; leave remainder out."
            )
            raise ArgumentError(msg)

    def _check_stream(self) -> None:
        kind = type(self.dataset).__name__
        if isinstance(self.dataset, (set, frozenset)):
            msg = f"af.Data: a {kind} has no order; give it as a sorted list."
            raise DataError(msg)
        if isinstance(self.dataset, Iterator):
            msg = (
                f"af.Data: a {kind} can be read once only; expected an object whose __iter__"
                " begins anew, as an IterableDataset's."
            )
            raise DataError(msg)
        ordered = self.shuffle or self.order is not None
        if ordered or not isinstance(self.batch_size, int):
            msg = (
                f"af.Data: {kind} is a stream, which comes in an order of its own. Give an"
                " integer batch_size, and no shuffle=, order= or batch_sampler=; shuffle in"
                " the stream itself."
            )
            raise ArgumentError(msg)
        if self.sharded and (self.dispatch or self.remainder != "short"):
            msg = (
                "af.Data(sharded=True): each rank reads samples of its own, of which the"
                " last batches are short; leave out dispatch= and remainder=."
            )
            raise ArgumentError(msg)
        if self.num_workers and (self.dispatch or isinstance(self.dataset, DataLoader)):
            msg = (
                f"af.Data(num_workers={self.num_workers}): one process reads this stream;"
                " leave it out, or let the stream itself have workers."
            )
            raise ArgumentError(msg)
        if promised_length(self.dataset) == 0:
            msg = f"af.Data: the dataset ({kind}) is empty."
            raise DataError(msg)

    @classmethod
    def mix(
        cls,
        datasets: Sequence[Any],
        *,
        weights: Sequence[float] | None = None,
        shuffle: bool = False,
        **options: Any,
    ) -> Self:
        """Return data that take samples of several datasets, in proportion to weights.

        An epoch has as many samples as all datasets together. Since the run
        began each dataset has had its share to within one sample, wherever 64 positions (or
        more, for small weights) end, and so within two in each 64. A dataset goes through
        its own samples epoch by epoch, however often that is in one of the mix's.

        Args:
            datasets: map-style; their samples collate with one another.
            weights: one each; by default, their lengths.
            shuffle: whether each has a shuffled order; which dataset is next is always drawn.
            options: as of `Data`.

        Example:
            >>> data = Data.mix([range(3), range(10, 13)], weights=[2, 1], batch_size=6)
            >>> len(data)
            6
        """
        taken = sorted({"order", "batch_sampler"} & options.keys())
        if taken:
            msg = f"af.Data.mix({taken[0]}=...): the mix is the order; leave it out."
            raise ArgumentError(msg)
        if not isinstance(datasets, Sequence):
            msg = f"af.Data.mix({datasets!r}): expected a list of datasets."
            raise ArgumentError(msg)
        sources = tuple(source_of(each) for each in datasets)
        lengths = tuple(len(each) for each in sources)
        if not sources or not all(lengths):
            msg = f"af.Data.mix: expected datasets with samples, got lengths {lengths}."
            raise DataError(msg)
        shares = lengths if weights is None else _listed(weights)
        fits = len(shares) == len(sources) and all(
            isinstance(each, (int, float)) and 0 < each < float("inf")
            for each in shares
        )
        if not fits:
            msg = (
                f"af.Data.mix(weights={weights!r}): expected {len(sources)} finite numbers"
                " above 0."
            )
            raise ArgumentError(msg)
        order = Mixed(lengths, shares, Shuffled() if shuffle else Sequential())
        return cls(Joined(sources), order=order, **options)

    @classmethod
    def zip(
        cls,
        *,
        batch_size: Any,
        shuffle: bool = False,
        remainder: str = "short",
        collate: Collate | None = None,
        num_workers: int = 0,
        timeout: float = 300.0,
        **datasets: Any,
    ) -> Self:
        """Return data whose samples are dicts, with a sample of each dataset by name.

        An epoch is as long as the longest; the others begin again. With `shuffle`, each has
        an order of its own, for data that are not paired (labelled and not, say). A batch's
        `indices` have a column for each.

        Example:
            >>> data = Data.zip(a=torch.arange(4), b=torch.arange(2), batch_size=3)
            >>> data.epoch(seed=0).order(np.arange(4)).tolist()
            [[0, 0], [1, 1], [2, 0], [3, 1]]
        """
        parts = {name: source_of(each) for name, each in datasets.items()}
        lengths = {name: len(each) for name, each in parts.items()}
        if not parts or not all(lengths.values()):
            msg = f"af.Data.zip: expected datasets with samples, got lengths {lengths}."
            raise DataError(msg)
        if isinstance(batch_size, budget):
            msg = (
                f"af.Data.zip(batch_size={batch_size!r}): samples of several datasets have"
                " no one cost; expected an integer."
            )
            raise ArgumentError(msg)
        inner = Shuffled() if shuffle else Sequential()
        return cls(
            Zipped(parts),
            batch_size=batch_size,
            order=Side(tuple(parts), tuple(lengths.values()), inner),
            remainder=remainder,
            collate=collate,
            num_workers=num_workers,
            timeout=timeout,
        )

    @classmethod
    def from_loader(cls, loader: "DataLoader[Any]", *, num_ranks: int = 1) -> Self:
        """Return what a torch DataLoader says, with its batch size as samples per update.

        Kept: dataset, batch size, sampler or batch sampler, drop_last, collate_fn,
        num_workers and timeout. A `shuffle=True` becomes accelfn's, which is a function of
        the state's seed. Batches go to pinned memory wherever there is a GPU. What is not
        kept is said in a warning.

        Args:
            loader: of torch, or torchdata's StatefulDataLoader.
            num_ranks: where the loader's batch size is one rank's: of how many.

        Raises:
            DataError: it gives each rank a part already, or does not batch.
        """
        return cls(**options_of(loader, num_ranks))

    @property
    def is_stream(self) -> bool:
        """Whether it is read from front to back, and not by index."""
        return not isinstance(self.dataset, _SOURCES) and is_stream(self.dataset)

    @cached_property
    def source(self) -> Source:
        """How samples are read, by index."""
        if isinstance(self.dataset, _SOURCES):
            return self.dataset
        return source_of(self.dataset)

    @cached_property
    def ordering(self) -> Order:
        """In which order samples come, by index."""
        if _is_order(self.order):
            return cast("Order", self.order)
        if self.order is not None:
            return Own(cast("OrderFunction", self.order))
        return Shuffled() if self.shuffle else Sequential()

    def __len__(self) -> int:
        """Return the number of samples of an epoch.

        Raises:
            LengthError: the dataset does not know it.
        """
        if self.is_stream:
            promised = promised_length(self.dataset)
            if promised is None or self.sharded:
                msg = (
                    f"af.Data: the stream {type(self.dataset).__name__} does not say how"
                    " many samples it has"
                    f"{' on all ranks together' if self.sharded else ''}. Do without a"
                    " length: give a schedule its num_updates=, and count as you read."
                )
                raise LengthError(msg)
            return promised
        if self.batch_sampler is not None:
            return len(self.source)
        return self.ordering.num_samples(len(self.source))

    @property
    def updates_per_epoch(self) -> int:
        """How many updates one pass over the data makes.

        Raises:
            DataError: it is not known, or differs from epoch to epoch; then
                `num_updates(epochs, seed=)` counts.
        """
        if self.batch_sampler is not None:
            return len(self.batch_sampler)
        if isinstance(self.batch_size, budget):
            msg = (
                "af.Data(batch_size=af.budget(...)).updates_per_epoch: epochs may have"
                " different numbers of updates; ask data.num_updates(epochs, seed=...)."
            )
            raise DataError(msg)
        return EvenCut(len(self), self.batch_size, self.remainder).updates_per_epoch

    def num_updates(self, epochs: int, *, seed: int = 0) -> int:
        """Return how many updates so many epochs make, for a state of this seed.

        Raises:
            ArgumentError: `epochs` is not a number of 0 or more.
        """
        if not isinstance(epochs, int) or isinstance(epochs, bool) or epochs < 0:
            msg = f"af.Data.num_updates(epochs={epochs!r}): expected an integer, 0 or more."
            raise ArgumentError(msg)
        if isinstance(self.batch_size, budget):
            return sum(self.num_updates_of(i, seed=seed) for i in range(epochs))
        return epochs * self.updates_per_epoch

    def num_updates_of(self, epoch: int, *, seed: int, start: int = 0) -> int:
        """Return how many updates an epoch makes from a sample on, for a state of this seed."""
        if not start and self.batch_sampler is not None:
            return self.updates_per_epoch
        return self._cut(epoch, seed).num_batches(start)

    def _cut(self, epoch: int, seed: int) -> Cut:
        """Return where an epoch's batches end; its order is made only if they depend on it."""
        if isinstance(self.batch_size, int):
            return EvenCut(len(self), self.batch_size, self.remainder)
        return self.epoch(seed=seed, number=epoch).cut

    def __repr__(self) -> str:
        """Show what the dataset is, not what is in it."""
        kind = type(self.dataset).__name__
        if self.is_stream:
            return f"<Data of a stream ({kind}), batches of {self.batch_size}>"
        if self.batch_sampler is not None:
            batches = f"batches by {type(self.batch_sampler).__name__}"
            return f"<Data of {len(self)} samples ({kind}), {batches}>"
        size = self.batch_size
        batches = (
            f"batches of {size}" if isinstance(size, int) else f"batches in {size!r}"
        )
        return (
            f"<Data of {len(self)} samples ({kind}), {self.ordering.name}, {batches}>"
        )

    @cached_property
    def facts(self) -> dict[str, Any]:
        """What must be the same where a run is resumed, as plain data."""
        size = self.batch_size
        facts: dict[str, Any] = {
            "batch_size": size if isinstance(size, int) else repr(size or "sampler"),
            "remainder": self.remainder,
        }
        if self.is_stream:
            return facts | {"fingerprint": self.fingerprint}
        sampler = self.batch_sampler
        order = self.ordering.name if sampler is None else type(sampler).__name__
        return facts | {
            "samples": len(self),
            "order": order,
            "fingerprint": self.fingerprint or fingerprint_of(self.source),
        }

    def in_order(self) -> "Data":
        """Return the data with each sample once, in the dataset's order, to evaluate on."""
        if self.is_stream:
            data = attrs.evolve(self, remainder="short")
            object.__setattr__(data, "first", self.first)  # it may be read by now
            return data
        size = self.batch_size
        if self.batch_sampler is not None:  # as large as its largest
            stops = [stop for _, stop in self.epoch(seed=0).cut.spans(0)]
            size = int(np.diff(stops, prepend=0).max())
        return attrs.evolve(
            self,
            batch_size=size,
            batch_sampler=None,
            shuffle=False,
            order=self.order if isinstance(self.order, Side) else None,
            remainder="short",
        )

    def epoch(self, *, seed: int, number: int = 0) -> Epoch:
        """Return one pass over the data: which index comes where, and where batches end."""
        key = streams.key(seed, "data", number)
        if self.batch_sampler is not None:
            return self._sampled_epoch(seed, number, key)
        size = self.batch_size if isinstance(self.batch_size, int) else None
        order = self.ordering.of_epoch(
            len(self.source), seed=seed, epoch=number, batch_size=size
        )
        n = len(self)
        if size is not None:
            return Epoch(number, n, order, self._cut(number, seed), key)
        cut = cast("budget", self.batch_size).cut(order(np.arange(n)))
        made = Epoch(number, n, order, cut, key)
        if getattr(self.ordering, "shuffles_batches", False):
            made = made.shuffled_batches(streams.key(seed, "batches", number))
        return made

    def _sampled_epoch(self, seed: int, number: int, key: int) -> Epoch:
        name = f"batch_sampler ({type(self.batch_sampler).__name__})"
        batches = drawn_once(self.batch_sampler, seed=seed, epoch=number)
        wrong = [each for each in batches if not isinstance(each, list)]
        if wrong:
            msg = f"{name} gave {wrong[0]!r} for an update; expected a list of indices."
            raise DataError(msg)
        empty = [i for i, batch in enumerate(batches) if not batch]
        if empty or not batches:
            msg = f"{name} gave no samples for update {empty[0] if empty else 0}."
            raise DataError(msg)
        flat = checked(
            np.concatenate([np.asarray(batch) for batch in batches]),
            n=len(self.source),
            where=name,
        )
        stops = np.cumsum([len(batch) for batch in batches])
        return Epoch(number, len(flat), lambda at: flat[at], UnevenCut(stops), key)

    def read(self, reading: Reading) -> Iterator[Batch]:
        """Yield a rank's batches, on its device."""
        return assembled(on_device(pairs_of(self, reading), reading.world.device))

    def check_start(self, start: Cursor, *, seed: int) -> None:
        """Raise if reading cannot begin at a cursor.

        Raises:
            BatchError: the epoch has no such sample.
            DataError: a stream that cannot be put there.
        """
        if not self.is_stream:
            used = self._cut(start.epoch, seed).used if start.samples else 1
            if start.samples >= used:
                msg = (
                    f"The cursor stands at sample {start.samples} of epoch {start.epoch},"
                    f" but an epoch of this data has {used}. Was the dataset or its batch"
                    " size changed?"
                )
                raise BatchError(msg)
            return
        if start.samples == 0 or start.memory is not None:
            return
        if self.sharded:
            msg = (
                f"af.Data(sharded=True): the cursor at sample {start.samples} of epoch"
                f" {start.epoch} does not say where each rank's stream"
                f" ({type(self.dataset).__name__}) stands. Take the cursor of a batch or of"
                " af.load; af.seek knows none."
            )
            raise DataError(msg)
        if not self.replay:
            raise DataError(stateless(self.dataset, start))


_STREAMS_ONLY = ("sharded", "dispatch", "replay")
_SOURCES = (Joined, Zipped)


def _listed(weights: Any) -> tuple[Any, ...]:
    """Return weights as a tuple, those of a tensor or an array too."""
    if hasattr(weights, "tolist"):
        weights = weights.tolist()
    return tuple(weights) if isinstance(weights, (list, tuple)) else ()


def _is_order(value: Any) -> bool:
    return hasattr(value, "of_epoch") and hasattr(value, "num_samples")
