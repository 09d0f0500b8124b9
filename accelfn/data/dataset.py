# SPDX-License-Identifier: Apache-2.0
"""`Data`: a dataset with its batch size, order and readers, as a value."""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, Literal, Self, cast

import attrs
import numpy as np
import torch
from torch.utils.data import DataLoader

from accelfn.base.arguments import (
    advise,
    check_integer,
    explain_call_errors,
    hint_attributes,
    is_integer,
    is_number,
    option,
    truth,
)
from accelfn.data.consistency import Looks
from accelfn.data.loader import options_of
from accelfn.data.loaders import Collate
from accelfn.data.order import (
    Order,
    OrderFunction,
    Own,
    Sequential,
    Shuffled,
    check_one_each,
    promised_length,
    refuse_distributed,
)
from accelfn.data.plan import (
    Batch,
    Cursor,
    Cut,
    Epoch,
    EvenCut,
    epoch_of,
    fingerprint_of,
    form_of,
    token_budget,
)
from accelfn.data.reading import Reading, read_batches
from accelfn.data.sources import (
    Joined,
    Source,
    is_stream,
    mix_datasets,
    source_of,
)
from accelfn.data.stream import first_state, resume_error
from accelfn.errors import ArgumentError, BatchError, DataError, LengthError

_FEW = 4
"""Samples in a list; fewer than rows that columns have."""
_MOST_WORKERS = 4096
"""More cores than a machine has."""


def _expect(is_valid: Callable[[Any], bool], expected: str) -> Any:
    """Return a validator that raises `ArgumentError` for an invalid option."""

    def check(_data: object, field: Any, value: object) -> None:
        if not is_valid(value):
            msg = f"af.Data({field.name}={value!r}): expected {expected}."
            raise ArgumentError(msg)

    return check


def _is_order(value: Any) -> bool:
    """Return whether a value is an order, and not a function that gives indices."""
    return hasattr(value, "of_epoch") and hasattr(value, "num_samples")


def _is_order_option(value: Any) -> bool:
    is_class = isinstance(value, type) and _is_order(
        value
    )  # orders.weighted, not called
    return value is None or ((callable(value) or _is_order(value)) and not is_class)


_BATCH_SIZE = _expect(
    lambda value: (
        value is None or isinstance(value, token_budget) or is_integer(value, 1)
    ),
    "an integer of at least 1, or af.token_budget(costs, limit=...)",
)
_REMAINDER = _expect(
    lambda value: value in ("short", "pad", "drop"), "one of 'short', 'pad', 'drop'"
)
_COLLATE = _expect(lambda value: value is None or callable(value), "a function")
_NUM_WORKERS = _expect(
    lambda value: is_integer(value, 0) and value <= _MOST_WORKERS,
    f"a number of processes from 0 to {_MOST_WORKERS}",
)
_ORDER = _expect(
    _is_order_option,
    "a function (seed, epoch, n) -> indices, or an order of af.orders. Give a torch sampler to"
    " a DataLoader, and that to af.Data.from_loader",
)
_TIMEOUT = _expect(
    lambda value: is_number(value) and 0 < value < float("inf"),
    "a finite number of seconds above 0",
)
_FINGERPRINT = _expect(
    lambda value: value is None or isinstance(value, str), "a string, or None"
)


def _check_dataset(data: "Data") -> None:
    """Raise for datasets of other kinds than samples."""
    dataset, kind = data.dataset, type(data.dataset).__name__
    if isinstance(dataset, Data):
        msg = f"af.Data: a {kind} cannot be read by index; give its dataset."
        raise DataError(msg)
    if isinstance(dataset, DataLoader) and dataset.batch_sampler is not None:
        msg = (
            f"af.Data: a {kind} gives batches, and samples are expected. Give"
            " af.Data.from_loader(loader), or TrainState.create(data=loader). For a stream of"
            f" samples, make the {kind} with batch_size=None."
        )
        raise ArgumentError(msg)


def _check_batching(data: "Data") -> None:
    """Raise for options that exclude each other, whatever the dataset."""
    sampler, why = data.batch_sampler, ""
    if data.global_batch_size is None and sampler is None:
        why = (
            ": got neither global_batch_size= nor batch_sampler=; give one of the two."
        )
    elif data.global_batch_size is not None and sampler is not None:
        why = ": got both global_batch_size= and batch_sampler=; give one of the two."
    elif data.order is not None and data.shuffle:
        why = "(shuffle=True, order=...): your order is not shuffled. Give one of the two."
    elif isinstance(data.global_batch_size, token_budget) and data.remainder != "short":
        why = (
            f"(global_batch_size=af.token_budget(...), remainder={data.remainder!r}): a batch is as"
            " large as it is; leave remainder out."
        )
    elif sampler is not None:
        if not all(hasattr(sampler, name) for name in ("__iter__", "__len__")):
            why = (
                f"(batch_sampler=...): {type(sampler).__name__} is not iterable, or has no"
                " length. Give lists of indices, or an object with __iter__ and __len__ that"
                " yields them."
            )
        elif data.order is not None or data.shuffle or data.remainder != "short":
            why = (
                "(batch_sampler=...): it says which samples come in which batch; leave out"
                " order=, shuffle= and remainder=."
            )
        else:
            refuse_distributed(sampler)
    if why:
        raise ArgumentError(f"af.Data{why}")  # noqa: EM102 - a message has a name


def _check_indexed(data: "Data") -> None:
    """Raise for options of a stream, and for an epoch without batches."""
    kind = type(data.dataset).__name__
    for name in ("sharded", "dispatch", "replay"):
        if getattr(data, name):
            msg = f"af.Data({name}=True): {kind} is read by index, not a stream; leave it out."
            raise ArgumentError(msg)
    if len(data.source) == 0:
        msg = f"af.Data: the dataset ({kind}) is empty."
        raise DataError(msg)
    _advise_of_columns(data.dataset)
    if isinstance(data.global_batch_size, token_budget):
        check_one_each(
            "af.token_budget", "costs", data.global_batch_size.costs, len(data.source)
        )
    if isinstance(data.global_batch_size, int) and not data.updates_per_epoch:
        msg = (
            f'af.Data(global_batch_size={data.global_batch_size}, remainder="drop"): the dataset'
            f" has {len(data)} samples, so every batch would be dropped. Take a smaller"
            " global_batch_size."
        )
        raise DataError(msg)


def _advise_of_columns(dataset: Any) -> None:
    """Warn if a list of samples looks like a list of columns, as inputs and targets."""
    if not isinstance(dataset, list):
        return
    rows = cast("list[Any]", dataset)
    are_tensors = all(isinstance(row, torch.Tensor) and row.ndim for row in rows)
    if not 2 <= len(rows) <= _FEW or not are_tensors:
        return
    lengths = {row.shape[0] for row in rows}
    if len(lengths) == 1 and (length := lengths.pop()) > _FEW:
        advise(
            f"af.Data([...]): a list is one of samples, and this one has {len(rows)}, tensors"
            f" of {length} rows each. If these are columns, as inputs and targets, give a"
            " tuple, af.Data((inputs, targets)); if they are samples, torch.stack(samples)."
        )


def _check_stream(data: "Data") -> None:
    """Raise for streams that cannot be read again, and for options of an index."""
    kind, why = type(data.dataset).__name__, ""
    if isinstance(data.dataset, (set, frozenset)):
        msg = f"af.Data: a {kind} has no order; give it as a sorted list."
        raise DataError(msg)
    if isinstance(data.dataset, Iterator):
        msg = (
            f"af.Data: a {kind} can be read once only; expected an object whose __iter__"
            " begins anew, as an IterableDataset's."
        )
        raise DataError(msg)
    is_ordered = data.shuffle or data.order is not None
    if is_ordered or not isinstance(data.global_batch_size, int):
        why = (
            f": {kind} is a stream, which has its own order. Give an integer global_batch_size, and"
            " no shuffle=, order= or batch_sampler=; shuffle in the stream itself."
        )
    elif data.sharded and (data.dispatch or data.remainder != "short"):
        why = (
            "(sharded=True): each rank reads its own samples, and its last batches are short;"
            " leave out dispatch= and remainder=."
        )
    elif data.num_workers and (data.dispatch or isinstance(data.dataset, DataLoader)):
        why = (
            f"(num_workers={data.num_workers}): one process reads this stream; leave it out,"
            " or let the stream itself have workers."
        )
    if why:
        raise ArgumentError(f"af.Data{why}")  # noqa: EM102 - a message has a name
    if promised_length(data.dataset) == 0:
        msg = f"af.Data: the dataset ({kind}) is empty."
        raise DataError(msg)


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
        global_batch_size: samples per update, over all ranks and micro-batches together; or
            `af.token_budget(...)`, as many as fit.
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
        >>> data = Data(torch.arange(10), global_batch_size=4)
        >>> len(data), data.updates_per_epoch
        (10, 3)
    """

    dataset: Any
    global_batch_size: Any = attrs.field(
        default=None, validator=_BATCH_SIZE, kw_only=True
    )
    shuffle: bool = option(default=False, validator=truth())
    remainder: Literal["short", "pad", "drop"] = option("short", _REMAINDER)
    collate: Collate | None = attrs.field(
        default=None, validator=_COLLATE, kw_only=True
    )
    num_workers: int = option(0, _NUM_WORKERS)
    order: Order | OrderFunction | None = attrs.field(
        default=None, validator=_ORDER, kw_only=True
    )
    batch_sampler: Any = attrs.field(default=None, kw_only=True)
    timeout: float = option(300.0, _TIMEOUT)
    fingerprint: str | None = option(None, _FINGERPRINT)
    sharded: bool = option(default=False, validator=truth())
    dispatch: bool = option(default=False, validator=truth())
    replay: bool = option(default=False, validator=truth())
    first: Any = attrs.field(default=None, init=False)
    """A stream's own state before it is read, with which each epoch begins."""

    def __attrs_post_init__(self) -> None:
        """Check the dataset and the options."""
        _check_dataset(self)
        _check_batching(self)
        if self.is_stream:
            _check_stream(self)
            object.__setattr__(self, "first", first_state(self.dataset))
        else:
            _check_indexed(self)

    @classmethod
    def mix(
        cls,
        datasets: Sequence[Any],
        *,
        weights: Sequence[float] | None = None,
        shuffle: bool = False,
        **options: Any,
    ) -> Self:
        """Create data with samples of several datasets, in proportion to weights.

        An epoch has as many samples as all datasets together. After each block of 64 positions
        (or more, for small weights), each dataset has had its share since the beginning of the
        run, to within one sample. Each dataset goes through its own samples epoch by epoch,
        maybe several times in an epoch of the mix.

        Args:
            datasets: map-style datasets; their samples must collate with one another.
            weights: a weight for each dataset; by default, their lengths.
            shuffle: whether each dataset is shuffled; the next dataset is always random.
            options: the options of `Data`.

        Example:
            >>> data = Data.mix([range(3), range(10, 13)], weights=[2, 1], global_batch_size=6)
            >>> len(data)
            6
        """
        for name in ("batch_sampler", "order"):
            if name in options:
                msg = f"af.Data.mix({name}=...): the mix is the order; leave it out."
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
        """Create data from a torch DataLoader; its batch size is the samples per update.

        accelfn keeps its dataset, batch size, sampler or batch sampler, drop_last, collate_fn,
        num_workers and timeout. A `shuffle=True` becomes accelfn's, which is a function of
        the state's seed. On a GPU, batches go to pinned memory. accelfn warns of
        other options that it does not keep.

        Args:
            loader: a loader of torch, or torchdata's StatefulDataLoader.
            num_ranks: the number of ranks, if the loader's batch size is for one rank.
            num_micro_batches: the number of micro-batches, if it is for one micro-batch.

        Raises:
            DataError: the loader gives each rank a part already, or does not batch.
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
        if _is_order(self.order):
            return cast("Order", self.order)
        if self.order is not None:
            return Own(cast("OrderFunction", self.order))
        return Shuffled() if self.shuffle else Sequential()

    def __bool__(self) -> bool:
        """Return True: an empty dataset is an error, and a stream may not know its length."""
        return True

    def __len__(self) -> int:
        """Return the number of samples of an epoch.

        Raises:
            LengthError: the dataset does not know it.
        """
        if self.is_stream:
            length = promised_length(self.dataset)
            if length is None or self.sharded:
                where = " on all ranks together" if self.sharded else ""
                msg = (
                    f"af.Data: the stream {type(self.dataset).__name__} does not say how many"
                    f" samples it has{where}. Do without a length: give a schedule its"
                    " num_updates=, and count as you read."
                )
                raise LengthError(msg)
            return length
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
        if isinstance(self.global_batch_size, token_budget):
            msg = (
                "af.Data(global_batch_size=af.token_budget(...)).updates_per_epoch: epochs may have"
                " different numbers of updates; ask data.num_updates(epochs, seed=...)."
            )
            raise DataError(msg)
        return EvenCut(len(self), self.global_batch_size, self.remainder).num_batches(0)

    def num_updates(self, epochs: int, *, seed: int = 0) -> int:
        """Return how many updates so many epochs make, for a state of this seed.

        Raises:
            ArgumentError: `epochs` is not a number of 0 or more.
        """
        check_integer("af.Data.num_updates", "epochs", epochs, 0)
        if isinstance(self.global_batch_size, token_budget):
            return sum(self.num_updates_of(i, seed=seed) for i in range(epochs))
        return epochs * self.updates_per_epoch

    def num_updates_of(self, epoch: int, *, seed: int, start: int = 0) -> int:
        """Return how many updates an epoch makes from a sample on, for a state of this seed."""
        if not start and self.batch_sampler is not None:
            return self.updates_per_epoch
        return self._cut_of(epoch, seed).num_batches(start)

    def _cut_of(self, epoch: int, seed: int) -> Cut:
        """Return where an epoch's batches end; its order is made only if they depend on it."""
        if isinstance(self.global_batch_size, int):
            return EvenCut(len(self), self.global_batch_size, self.remainder)
        return self.epoch(seed=seed, number=epoch).cut

    def __repr__(self) -> str:
        """Show what the dataset is, not what is in it."""
        kind = type(self.dataset).__name__
        if self.is_stream:
            return f"<Data of a stream ({kind}), batches of {self.global_batch_size}>"
        if self.batch_sampler is not None:
            batches = f"batches by {type(self.batch_sampler).__name__}"
            return f"<Data of {len(self)} samples ({kind}), {batches}>"
        word = "of" if isinstance(self.global_batch_size, int) else "in"
        batches = f"{self.ordering.name}, batches {word} {self.global_batch_size!r}"
        return f"<Data of {len(self)} samples ({kind}), {batches}>"

    @cached_property
    def facts(self) -> dict[str, Any]:
        """Plain data that must be the same when a run is resumed."""
        name = self.fingerprint
        if not self.is_stream:
            name = name or fingerprint_of(self.source)
        return form_of(self) | {"fingerprint": name}

    @cached_property
    def looks(self) -> Looks | None:
        """Digests of a few samples, for ranks that compare them; None for a stream."""
        return None if self.is_stream else Looks(self.source)

    def in_order(self) -> "Data":
        """Return the data with each sample once, in the dataset's order, to evaluate on."""
        if self.is_stream:
            data = attrs.evolve(self, remainder="short")
            object.__setattr__(data, "first", self.first)  # it may be read by now
            return data
        size = self.global_batch_size
        if self.batch_sampler is not None:  # as large as its largest
            stops = [stop for _, stop in self.epoch(seed=0).cut.spans(0)]
            size = int(np.diff(stops, prepend=0).max())
        return attrs.evolve(
            self,
            global_batch_size=size,
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
        return read_batches(self, reading)

    def check_start(self, start: Cursor, *, seed: int) -> None:
        """Raise if reading cannot begin at a cursor.

        Raises:
            BatchError: the epoch has no such sample.
            DataError: a stream that cannot be put there.
        """
        place = f"sample {start.samples} of epoch {start.epoch}"
        if start.samples == 0:
            return
        if not self.is_stream:
            epoch_cut = self._cut_of(start.epoch, seed)
            if not epoch_cut.num_batches(start.samples):
                msg = (
                    f"The cursor stands at {place}, but an epoch of this data has"
                    f" {epoch_cut.end(0)} in its batches, and no batch is left. Was the dataset or"
                    " its batch size changed?"
                )
                raise BatchError(msg)
        elif self.sharded and start.memory is None:
            msg = (
                f"af.Data(sharded=True): the cursor at {place} does not say where each rank's"
                f" stream ({type(self.dataset).__name__}) stands. Take the cursor of a batch"
                " or of af.load; af.seek has no state."
            )
            raise DataError(msg)
        elif not self.replay and start.memory is None:
            raise resume_error(self.dataset, start)
