# SPDX-License-Identifier: Apache-2.0
"""`Data`: a dataset with its batch size, order and readers, as a value."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, Self, cast

import attrs
import numpy as np
import torch
from torch.utils.data import DataLoader

from accelfn.base.arguments import (
    advise,
    check_integer,
    explain_call_errors,
    integer,
    is_integer,
    is_number,
    truth,
)
from accelfn.base.hints import hint_attributes
from accelfn.data.consistency import Looks
from accelfn.data.epoch import Epoch, epoch_of, fingerprint_of, form_of
from accelfn.data.loader import options_of
from accelfn.data.loaders import Collate, on_device
from accelfn.data.order import (
    Order,
    OrderFunction,
    Own,
    Sequential,
    Shuffled,
    promised_length,
    refuse_distributed,
)
from accelfn.data.plan import REMAINDERS, Batch, Cursor, Cut, EvenCut, budget
from accelfn.data.reading import Reading, assemble_batches, pairs_of
from accelfn.data.sources import (
    Joined,
    Source,
    mix_datasets,
    source_of,
)
from accelfn.data.stream import first_state, is_stream, stateless
from accelfn.errors import ArgumentError, BatchError, DataError, LengthError

# What `Data` refuses, as it is made.


_STREAMS_ONLY = ("sharded", "dispatch", "replay")
_FEW = 4
"""Samples in a list; fewer than rows that columns have."""
_MOST_WORKERS = 4096
"""More cores than a machine has."""


def is_batch_size(_owner: object, _field: object, value: object) -> None:
    """Refuse what is no number of samples, budget or None; attrs validators, all of these."""
    if value is None or isinstance(value, budget):
        return
    if not is_integer(value, 1):
        msg = (
            f"af.Data(batch_size={value!r}): expected an integer of at least 1, or"
            " af.budget(costs, limit=...)."
        )
        raise ArgumentError(msg)


def is_num_workers(owner: object, field: Any, value: object) -> None:
    """Refuse what is no number of processes, and more than there can be."""
    integer(0, "a number of processes")(owner, field, value)
    if is_integer(value, _MOST_WORKERS + 1):
        msg = (
            f"af.Data(num_workers={value}): expected {_MOST_WORKERS} processes at most, and"
            " no more than this one may use cores."
        )
        raise ArgumentError(msg)


def is_remainder(_owner: object, _field: object, value: object) -> None:
    """Refuse any other word."""
    if value not in REMAINDERS:
        msg = (
            f"af.Data(remainder={value!r}): expected one of"
            f" {', '.join(map(repr, REMAINDERS))}."
        )
        raise ArgumentError(msg)


def is_duration(_owner: object, _field: object, value: object) -> None:
    """Refuse what is no time to wait."""
    if not is_number(value) or not 0 < value < float("inf"):
        msg = (
            f"af.Data(timeout={value!r}): expected a finite number of seconds above 0."
        )
        raise ArgumentError(msg)


def is_text(_owner: object, field: Any, value: object) -> None:
    """Refuse anything but text and None."""
    if value is not None and not isinstance(value, str):
        msg = f"af.Data({field.name}={value!r}): expected a string, or None."
        raise ArgumentError(msg)


def is_order(value: Any) -> bool:
    """Whether it is an order, and not a function that says one."""
    return hasattr(value, "of_epoch") and hasattr(value, "num_samples")


def check_options(data: "Data") -> None:
    """Refuse options that cannot be together, whatever the dataset."""
    if data.collate is not None and not callable(data.collate):
        msg = f"af.Data(collate={data.collate!r}): expected a function."
        raise ArgumentError(msg)
    if isinstance(data.dataset, type(data)):
        msg = f"af.Data: a {type(data).__name__} cannot be read by index; give its dataset."
        raise DataError(msg)
    _check_loader(data.dataset)
    _check_order(data)
    _check_batching(data)


def check_indexed(data: "Data") -> None:
    """Refuse what does not go with a dataset that is read by index."""
    given = [name for name in _STREAMS_ONLY if getattr(data, name)]
    if given:
        msg = (
            f"af.Data({given[0]}=True): {type(data.dataset).__name__} is read by index,"
            " not a stream; leave it out."
        )
        raise ArgumentError(msg)
    if len(data.source) == 0:
        msg = f"af.Data: the dataset ({type(data.dataset).__name__}) is empty."
        raise DataError(msg)
    _warn_of_columns(data.dataset)
    n = len(data)
    if isinstance(data.batch_size, budget):
        data.batch_size.check(len(data.source))
    if isinstance(data.batch_size, int) and not data.updates_per_epoch:
        msg = (
            f'af.Data(batch_size={data.batch_size}, remainder="drop"): the dataset'
            f" has {n} samples, so every batch would be dropped."
            " Take a smaller batch_size."
        )
        raise DataError(msg)


def _warn_of_columns(dataset: Any) -> None:
    """Say if a list of samples looks like one of columns, as inputs and targets."""
    if not isinstance(dataset, list):
        return
    rows = cast("list[Any]", dataset)
    are_tensors = all(isinstance(each, torch.Tensor) and each.ndim for each in rows)
    if not 2 <= len(rows) <= _FEW or not are_tensors:
        return
    lengths = {each.shape[0] for each in rows}
    if len(lengths) == 1 and (length := lengths.pop()) > _FEW:
        advise(
            f"af.Data([...]): a list is one of samples, and this one has {len(rows)}, tensors"
            f" of {length} rows each. If these are columns, as inputs and targets, give a"
            " tuple, af.Data((inputs, targets)); if they are samples, torch.stack(samples)."
        )


def _check_loader(dataset: Any) -> None:
    """Refuse a DataLoader whose batches would be taken for samples."""
    if isinstance(dataset, DataLoader) and dataset.batch_sampler is not None:
        kind = type(cast("Any", dataset)).__name__
        msg = (
            f"af.Data: a {kind} gives batches, and samples are expected. Give"
            " af.Data.from_loader(loader), or TrainState.create(data=loader); as a stream"
            f" of samples, make the {kind} with batch_size=None."
        )
        raise ArgumentError(msg)


def _check_order(data: "Data") -> None:
    order: Any = data.order
    is_uncalled = isinstance(order, type) and is_order(order)  # orders.weighted
    if order is None or ((callable(order) or is_order(order)) and not is_uncalled):
        return
    msg = (
        f"af.Data(order={order!r}): expected a function (seed, epoch, n) -> indices, or"
        " what one of af.orders returns. Give a torch sampler to a DataLoader, and that"
        " to af.Data.from_loader."
    )
    raise ArgumentError(msg)


def _check_batching(data: "Data") -> None:
    if (data.batch_size is None) == (data.batch_sampler is None):
        neither = data.batch_size is None
        given = (
            "neither batch_size= nor batch_sampler="
            if neither
            else "both batch_size= and batch_sampler="
        )
        msg = f"af.Data: got {given}; give one of the two."
        raise ArgumentError(msg)
    if data.order is not None and data.shuffle:
        msg = (
            "af.Data(shuffle=True, order=...): an order of your own is not shuffled"
            " again. Give one of the two."
        )
        raise ArgumentError(msg)
    if data.batch_sampler is not None:
        kind = type(data.batch_sampler).__name__
        if not all(hasattr(data.batch_sampler, m) for m in ("__iter__", "__len__")):
            msg = (
                f"af.Data(batch_sampler=...): {kind} is not iterable, or has no length;"
                " expected lists of indices, or an object with __iter__ and __len__"
                " that yields them."
            )
            raise ArgumentError(msg)
        refuse_distributed(data.batch_sampler)
        if data.order is not None or data.shuffle or data.remainder != "short":
            msg = (
                "af.Data(batch_sampler=...): it says which samples come in which batch;"
                " leave out order=, shuffle= and remainder=."
            )
            raise ArgumentError(msg)
    if isinstance(data.batch_size, budget) and data.remainder != "short":
        msg = (
            f"af.Data(batch_size=af.budget(...), remainder={data.remainder!r}): a batch"
            " is as large as it is; leave remainder out."
        )
        raise ArgumentError(msg)


def check_stream(data: "Data") -> None:
    """Refuse what does not go with a stream."""
    kind = type(data.dataset).__name__
    if isinstance(data.dataset, (set, frozenset)):
        msg = f"af.Data: a {kind} has no order; give it as a sorted list."
        raise DataError(msg)
    if isinstance(data.dataset, Iterator):
        msg = (
            f"af.Data: a {kind} can be read once only; expected an object whose __iter__"
            " begins anew, as an IterableDataset's."
        )
        raise DataError(msg)
    ordered = data.shuffle or data.order is not None
    if ordered or not isinstance(data.batch_size, int):
        msg = (
            f"af.Data: {kind} is a stream, which comes in an order of its own. Give an"
            " integer batch_size, and no shuffle=, order= or batch_sampler=; shuffle in"
            " the stream itself."
        )
        raise ArgumentError(msg)
    if data.sharded and (data.dispatch or data.remainder != "short"):
        msg = (
            "af.Data(sharded=True): each rank reads samples of its own, of which the"
            " last batches are short; leave out dispatch= and remainder=."
        )
        raise ArgumentError(msg)
    if data.num_workers and (data.dispatch or isinstance(data.dataset, DataLoader)):
        msg = (
            f"af.Data(num_workers={data.num_workers}): one process reads this stream;"
            " leave it out, or let the stream itself have workers."
        )
        raise ArgumentError(msg)
    if promised_length(data.dataset) == 0:
        msg = f"af.Data: the dataset ({kind}) is empty."
        raise DataError(msg)


def check_sample(start: Cursor, cut: Cut) -> None:
    """Refuse a cursor from which no batch of its epoch is left."""
    if not cut.num_batches(start.samples):
        msg = (
            f"The cursor stands at sample {start.samples} of epoch {start.epoch}, but an"
            f" epoch of this data has {cut.end(0)} in its batches, and none is left. Was the"
            " dataset or its batch size changed?"
        )
        raise BatchError(msg)


def check_stream_start(data: "Data", start: Cursor) -> None:
    """Refuse a cursor at which a stream cannot be put."""
    if start.samples == 0 or start.memory is not None:
        return
    if data.sharded:
        msg = (
            f"af.Data(sharded=True): the cursor at sample {start.samples} of epoch"
            f" {start.epoch} does not say where each rank's stream"
            f" ({type(data.dataset).__name__}) stands. Take the cursor of a batch or of"
            " af.load; af.seek knows none."
        )
        raise DataError(msg)
    if not data.replay:
        raise DataError(stateless(data.dataset, start))


def _flag() -> Any:
    return attrs.field(default=False, kw_only=True, validator=truth())


@explain_call_errors
@hint_attributes("setattr", "iter", "getitem")
@attrs.frozen(eq=False, repr=False)
class Data:
    """A dataset, with its order, batch size and readers.

    Attributes:
        dataset: a dataset with `__len__` and `__getitem__` (or `__getitems__`). Tensors (a
            tensor, a tuple or dict of tensors, a TensorDataset or its Subset) and Arrow
            tables are gathered a batch at a time. Or a stream: an IterableDataset, or any
            other object that can be iterated over several times.
        batch_size: samples per update, over all ranks and micro-batches together; or
            `af.budget(...)`, as many as fit.
        shuffle: whether to shuffle every epoch. The order is a pure function of the state's
            seed and the epoch, and the same for every number of ranks.
        remainder: how to treat a short last batch. "short": split it like any other; its
            mean is over its samples. "pad": fill it from the start of the epoch's order,
            cyclically; the repeats count in its mean, and evaluation leaves them out.
            "drop": leave it out.
        collate: makes a batch from a list of samples; default torch's. If it leaves samples
            out, a loss that is a plain mean gets too much weight compared with other ranks
            and micro-batches, and accelfn warns.
        num_workers: number of reader processes of each rank; 0 reads in this process.
            accelfn warns if there are more than the usable cores, when reading begins.
        order: one of `af.orders`, or your function `(seed, epoch, n) -> indices`.
        batch_sampler: a torch batch sampler, or any object with a length that yields lists of
            indices, one list per update. It replaces all options above except `collate` and
            `num_workers`.
        timeout: seconds that a worker may take for a batch.
        fingerprint: identifies this dataset when a checkpoint is loaded; by default a hash
            of some samples.
        sharded: whether the stream gives different samples to every rank and worker. Ranks
            stay in step by one small collective per update.
        dispatch: whether only rank 0 reads the stream, for all ranks.
        replay: whether a stream without state may be resumed by reading it again from the
            start.

    Law:
        A sample's place, and the random numbers of reading it, depend on (seed, epoch) alone,
        not on ranks, workers or micro-batches; `sharded` data excepted.

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
    batch_size: Any = attrs.field(default=None, validator=is_batch_size, kw_only=True)
    shuffle: bool = _flag()
    remainder: str = attrs.field(default="short", validator=is_remainder, kw_only=True)
    collate: Collate | None = attrs.field(default=None, kw_only=True)
    num_workers: int = attrs.field(default=0, validator=is_num_workers, kw_only=True)
    order: Order | OrderFunction | None = attrs.field(default=None, kw_only=True)
    batch_sampler: Any = attrs.field(default=None, kw_only=True)
    timeout: float = attrs.field(default=300.0, validator=is_duration, kw_only=True)
    fingerprint: str | None = attrs.field(default=None, validator=is_text, kw_only=True)
    sharded: bool = _flag()
    dispatch: bool = _flag()
    replay: bool = _flag()
    first: Any = attrs.field(default=None, init=False)
    """A stream's own state before it is read, with which each epoch begins."""

    def __attrs_post_init__(self) -> None:
        """Look at the dataset once, and refuse what cannot be together."""
        check_options(self)
        if self.is_stream:
            check_stream(self)
            object.__setattr__(self, "first", first_state(self.dataset))
        else:
            check_indexed(self)

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
        source, order = mix_datasets(datasets, weights=weights, shuffle=shuffle)
        return cls(source, order=order, **options)

    @classmethod
    @explain_call_errors
    def from_loader(
        cls,
        loader: "DataLoader[Any]",
        *,
        num_ranks: int = 1,
        num_micro_batches: int = 1,
    ) -> Self:
        """Return what a torch DataLoader says, with its batch size as samples per update.

        Kept: dataset, batch size, sampler or batch sampler, drop_last, collate_fn,
        num_workers and timeout. A `shuffle=True` becomes accelfn's, which is a function of
        the state's seed. Batches go to pinned memory wherever there is a GPU. What is not
        kept is said in a warning.

        Args:
            loader: of torch, or torchdata's StatefulDataLoader.
            num_ranks: where the loader's batch size is one rank's: of how many.
            num_micro_batches: where it is one micro-batch's: of how many.

        Raises:
            DataError: it gives each rank a part already, or does not batch.
        """
        return cls(**options_of(loader, num_ranks, num_micro_batches))

    @property
    def is_stream(self) -> bool:
        """Whether it is read from front to back, and not by index."""
        return not isinstance(self.dataset, Joined) and is_stream(self.dataset)

    @cached_property
    def source(self) -> Source:
        """How samples are read, by index."""
        if isinstance(self.dataset, Joined):
            return self.dataset
        return source_of(self.dataset)

    @cached_property
    def ordering(self) -> Order:
        """In which order samples come, by index."""
        if is_order(self.order):
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
        check_integer("af.Data.num_updates", "epochs", epochs, 0)
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
        if self.is_stream:
            return form_of(self) | {"fingerprint": self.fingerprint}
        return form_of(self) | {
            "fingerprint": self.fingerprint or fingerprint_of(self.source)
        }

    @cached_property
    def looks(self) -> Looks | None:
        """What is seen of a few samples, for ranks that compare them; None of a stream."""
        return None if self.is_stream else Looks(self.source)

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
            order=None,
            remainder="short",
        )

    def epoch(self, *, seed: int, number: int = 0) -> Epoch:
        """Return one pass over the data: which index comes where, and where batches end."""
        return epoch_of(self, seed=seed, number=number)

    def read(self, reading: Reading) -> Iterator[Batch]:
        """Yield a rank's batches, on its device."""
        pairs = on_device(pairs_of(self, reading), reading.world.device)
        return assemble_batches(pairs, reading.plan)

    def check_start(self, start: Cursor, *, seed: int) -> None:
        """Raise if reading cannot begin at a cursor.

        Raises:
            BatchError: the epoch has no such sample.
            DataError: a stream that cannot be put there.
        """
        if self.is_stream:
            check_stream_start(self, start)
        elif start.samples:
            check_sample(start, self._cut(start.epoch, seed))
