# SPDX-License-Identifier: Apache-2.0
"""`Data`: an immutable record of a dataset, its batch size, its order and how to read it."""

from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from math import prod
from typing import Any, Literal, Self, cast

import attrs
import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, default_collate

from accelfn.base import draws
from accelfn.base.arguments import (
    advise,
    check_integer,
    explain_call_errors,
    hint_attributes,
    is_integer,
    is_number,
    one_of,
    option,
    satisfies,
    truth,
)
from accelfn.data.consistency import Looks, fingerprint_of
from accelfn.data.loaders import Collate
from accelfn.data.order import (
    Order,
    OrderFunction,
    Own,
    Sequential,
    Shuffled,
    check_one_each,
    is_plain,
    order_of_array,
    order_of_sampler,
    promised_length,
    refuse_distributed,
)
from accelfn.data.plan import (
    Cursor,
    Cut,
    Epoch,
    EvenCut,
    read_batch_sampler,
    token_budget,
)
from accelfn.data.reading import dropped_error, first_state, resume_error
from accelfn.data.sources import (
    Source,
    is_stream,
    mix_datasets,
    source_of,
)
from accelfn.errors import ArgumentError, BatchError, DataError, LengthError

_FEW = 4
"""A list of at most this many tensors may be a list of columns, if each has more rows."""
_MOST_WORKERS = 4096
"""The largest number of workers that is accepted: more than a machine has cores."""


def _is_order(value: Any) -> bool:
    """Return whether a value is an `Order`, and not a function that returns indices."""
    return hasattr(value, "of_epoch") and hasattr(value, "num_samples")


def _is_order_option(value: Any) -> bool:
    # reject a class such as orders.weighted, which the user forgot to call
    is_class = isinstance(value, type) and _is_order(value)
    return value is None or ((callable(value) or _is_order(value)) and not is_class)


_BATCH_SIZE = satisfies(
    lambda size: size is None or isinstance(size, token_budget) or is_integer(size, 1),
    "an integer of at least 1, or af.token_budget(costs, limit=...)",
)
_COLLATE = satisfies(lambda value: value is None or callable(value), "a function")
_NUM_WORKERS = satisfies(
    lambda value: is_integer(value, 0) and value <= _MOST_WORKERS,
    f"a number of processes from 0 to {_MOST_WORKERS}",
)
_ORDER = satisfies(
    _is_order_option,
    "a function (seed, epoch, n) -> indices, or an order from af.orders. For a torch sampler,"
    " write af.Data.from_loader(DataLoader(dataset, sampler=sampler, ...))",
)
_TIMEOUT = satisfies(
    lambda value: is_number(value) and 0 < value < float("inf"),
    "a finite number of seconds above 0",
)
_FINGERPRINT = satisfies(
    lambda value: value is None or isinstance(value, str), "a string, or None"
)


def _check_dataset(data: "Data") -> None:
    """Raise an error if the dataset is an `af.Data`, or a DataLoader that makes batches."""
    dataset, kind = data.dataset, type(data.dataset).__name__
    if isinstance(dataset, Data):
        msg = "af.Data: the dataset is itself an af.Data. Pass data.dataset instead."
        raise DataError(msg)
    if isinstance(dataset, DataLoader) and dataset.batch_sampler is not None:
        reason = f"a {kind} returns batches, but af.Data expects samples"
        advice = "Write af.Data.from_loader(loader) or TrainState.create(data=loader)"
        stream = f"For a stream of samples, create the {kind} with batch_size=None"
        msg = f"af.Data: {reason}. {advice}. {stream}."
        raise ArgumentError(msg)


def _check_batching(data: "Data") -> None:
    """Raise an error for options that exclude each other for every dataset."""
    sampler, why = data.batch_sampler, ""
    if data.global_batch_size is None and sampler is None:
        why = ": got neither global_batch_size= nor batch_sampler=. Pass one of them."
    elif data.global_batch_size is not None and sampler is not None:
        why = ": got both global_batch_size= and batch_sampler=. Pass only one of them."
    elif data.order is not None and data.shuffle:
        why = "(shuffle=True, order=...): pass only one of them, because order= is not shuffled."
    elif isinstance(data.global_batch_size, token_budget) and data.remainder != "short":
        call = f"global_batch_size=af.token_budget(...), remainder={data.remainder!r}"
        reason = "batches of a token budget have no fixed size, so none is too short"
        why = f"({call}): {reason}. Leave out remainder=."
    elif sampler is not None:
        if not all(hasattr(sampler, name) for name in ("__iter__", "__len__")):
            kind = type(sampler).__name__
            advice = "Pass a list of lists of indices, or an object that yields them"
            why = f"(batch_sampler=...): {kind} is not iterable, or has no length. {advice}."
        elif data.order is not None or data.shuffle or data.remainder != "short":
            reason = "the sampler determines the samples of every batch"
            why = f"(batch_sampler=...): {reason}. Leave out order=, shuffle= and remainder=."
        else:
            refuse_distributed(sampler)
    if why:
        raise ArgumentError(f"af.Data{why}")  # noqa: EM102 - the message is complete


def _check_indexed(data: "Data") -> None:
    """Raise an error for options that need a stream, and for an epoch without batches."""
    kind = type(data.dataset).__name__
    for name in ("sharded", "dispatch", "replay"):
        if getattr(data, name):
            msg = f"af.Data({name}=True): {kind} is not a stream, but read by index. Leave it out."
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
        raise dropped_error(data, len(data))


def _advise_of_columns(dataset: Any) -> None:
    """Warn if a list looks like columns (such as inputs and targets), and not like samples."""
    rows = cast("list[Any]", dataset) if isinstance(dataset, list) else []
    if not 2 <= len(rows) <= _FEW:
        return
    lengths = {
        len(row) if isinstance(row, torch.Tensor) and row.ndim else 0 for row in rows
    }
    length = lengths.pop()
    if not lengths and length > _FEW:
        advise(
            f"af.Data([...]): accelfn reads a list as samples, and this list has {len(rows)}:"
            f" tensors of {length} rows each. If they are columns, such as inputs and targets,"
            " pass a tuple: af.Data((inputs, targets)). If they are samples, pass"
            " torch.stack(samples)."
        )


def _check_stream(data: "Data") -> None:
    """Raise an error for streams that can be read only once, and for options that need an index."""
    kind, why = type(data.dataset).__name__, ""
    if isinstance(data.dataset, (set, frozenset)):
        msg = f"af.Data: a {kind} has no order. Pass sorted(dataset) instead."
        raise DataError(msg)
    if isinstance(data.dataset, Iterator):
        advice = "Pass an object that starts from its first sample at each __iter__"
        msg = f"af.Data: a {kind} can be read only once. {advice}, such as an IterableDataset."
        raise DataError(msg)
    is_ordered = data.shuffle or data.order is not None
    if is_ordered or not isinstance(data.global_batch_size, int):
        advice = "Pass an integer global_batch_size=, without shuffle=, order= or batch_sampler="
        why = f": {kind} is a stream, with its own order. {advice}. Shuffle inside the stream."
    elif data.sharded and (data.dispatch or data.remainder != "short"):
        reason = "each rank reads its own samples, and its last batches are short"
        why = f"(sharded=True): {reason}. Leave out dispatch= and remainder=."
    elif data.num_workers and (data.dispatch or isinstance(data.dataset, DataLoader)):
        advice = "Leave out num_workers=, or use workers inside the stream"
        why = f"(num_workers={data.num_workers}): only one process reads this stream. {advice}."
    if why:
        raise ArgumentError(f"af.Data{why}")  # noqa: EM102 - the message is complete
    if promised_length(data.dataset) == 0:
        msg = f"af.Data: the dataset ({kind}) is empty."
        raise DataError(msg)


# `af.Data.from_loader`: convert a torch DataLoader to arguments of `af.Data`.


_IGNORED = {
    "worker_init_fn": "accelfn seeds the generators for each sample; seed in the dataset",
    "generator": "the order comes from the state's seed",
    "multiprocessing_context": "multiprocessing.set_start_method decides how workers start",
}


_ITERATION = ("__iter__", "__len__", "_get_iterator", "_index_sampler")
"""Methods by which a subclass can change its batches. accelfn does not call them."""


def _options_of(loader: Any, num_ranks: int, num_micro_batches: int) -> dict[str, Any]:
    """Return the arguments of `af.Data` for a DataLoader.

    Raises:
        DataError: the loader is not a DataLoader, makes no batches, or splits the samples among
            ranks.
    """
    if not isinstance(loader, DataLoader):
        msg = f"af.Data.from_loader: expected a torch DataLoader, got {type(loader).__name__}."
        raise DataError(msg)
    _refuse_own_iteration(loader)
    counts = {"num_ranks": num_ranks, "num_micro_batches": num_micro_batches}
    for name, count in counts.items():
        meaning = name.replace("num_", "a number of ")
        check_integer("af.Data.from_loader", name, count, 1, meaning)
    for name, instead in _IGNORED.items():
        if getattr(loader, name, None) is not None:
            advise(
                f"af.Data.from_loader: accelfn ignores the loader's {name}: {instead}."
            )
    collate = loader.collate_fn
    options = {
        "dataset": loader.dataset,
        "collate": None if collate is default_collate else collate,
        "num_workers": loader.num_workers,
        **({"timeout": loader.timeout} if loader.timeout else {}),
    }
    return options | _batching(loader, counts)


def _batching(loader: "DataLoader[Any]", counts: dict[str, int]) -> dict[str, Any]:
    size, parts = loader.batch_size, prod(counts.values())
    remainder = "drop" if loader.drop_last else "short"
    if is_stream(loader.dataset):
        if size is None:
            collate = partial(_convert_lone, loader.collate_fn)
            return {"global_batch_size": parts, "collate": collate}
        return {"global_batch_size": size * parts, "remainder": remainder}
    refuse_distributed(loader.sampler)
    batches = loader.batch_sampler
    if is_plain(batches, BatchSampler) and size is not None:
        order = order_of_sampler(loader.sampler, len(cast("Any", loader.dataset)))
        is_plain_order = isinstance(order, (Shuffled, Sequential))
        return {
            "global_batch_size": size * parts,
            "shuffle": isinstance(order, Shuffled),
            "order": None if is_plain_order else order,
            "remainder": remainder,
        }
    if batches is None:
        advice = "Write af.Data(dataset, global_batch_size=...) instead"
        msg = f"af.Data.from_loader: this loader makes no batches (batch_size=None). {advice}."
        raise DataError(msg)
    if parts != 1:
        name = next(name for name, count in counts.items() if count != 1)
        call, kind = f"{name}={counts[name]}", type(batches).__name__
        reason = f"a batch of {kind} is the batch of a whole update, over all"
        msg = f"af.Data.from_loader({call}): {reason} ranks and micro-batches. Leave out {name}=."
        raise DataError(msg)
    return {"batch_sampler": batches}


def _refuse_own_iteration(loader: Any) -> None:
    """Raise an error if a subclass of DataLoader has its own methods for making batches."""
    for cls in type(loader).__mro__:
        if cls is DataLoader or cls.__module__.startswith("torchdata."):
            return
        methods = [name for name in _ITERATION if name in vars(cls)]
        if methods:
            msg = (
                f"af.Data.from_loader: {cls.__name__} has its own {methods[0]}, but accelfn does"
                " not call it: it reads the dataset in the order of the loader's sampler. Move"
                " that code to the dataset, the sampler or collate_fn, and pass a plain"
                " DataLoader. Or write `for batch in af.join_uneven(loader, world):`, with a"
                " loader of different samples on each rank."
            )
            raise DataError(msg)


def _convert_lone(convert: Any, samples: list[Any]) -> Any:
    """Return the only item of a list, converted by the loader's `collate_fn`."""
    (sample,) = samples
    return convert(sample)


@explain_call_errors
@hint_attributes("setattr", "iter", "getitem")
@attrs.frozen(eq=False, repr=False)
class Data:
    """A dataset with its batch size, its order, and options for reading it.

    Attributes:
        dataset: a dataset with `__len__` and `__getitem__` (or `__getitems__`), or a stream.
            A stream is an IterableDataset, or another object that you can iterate over several
            times. accelfn reads whole batches from an Arrow table, and from a dataset that is
            made of tensors: a tensor, a tuple or dict of tensors, a TensorDataset or a Subset
            of one.
        global_batch_size: the number of samples per update, over all ranks and micro-batches.
            Or `af.token_budget(...)`, which takes as many samples as fit.
        shuffle: whether to shuffle in every epoch. The order depends only on the state's seed
            and the epoch, and not on the number of ranks.
        remainder: how to treat a short last batch of an epoch. "short" splits it like other
            batches, and divides by its own number of samples. "pad" fills it with samples from
            the start of the epoch's order. These repeats count in the batch's mean, but not in
            evaluation. "drop" leaves the batch out.
        collate: a function that makes a batch from a list of samples; by default torch's. It
            may leave out samples. Then a loss that is a plain mean gets too much weight
            compared with other ranks and micro-batches, and accelfn warns.
        num_workers: the number of worker processes of each rank that read samples. With 0, this
            process reads. accelfn warns at the start of reading if there are more workers than
            usable cores.
        order: an order from `af.orders`, or your function `(seed, epoch, n) -> indices`.
        batch_sampler: a torch batch sampler, or another object with a length that yields lists
            of indices, one list for each update. It replaces all options above except `collate`
            and `num_workers`.
        timeout: how many seconds a worker may need for a batch.
        fingerprint: a name that identifies the dataset when a checkpoint is loaded; by default
            a hash of some samples.
        sharded: whether the stream yields different samples on each rank and worker. Then ranks
            stay in step with one small collective per update.
        dispatch: whether only rank 0 reads the stream, and sends the samples to all ranks.
        replay: whether a stream without `state_dict()` may be resumed by reading it again from
            the start.

    Law:
        A sample's position, and the random numbers for reading it, depend only on the seed and
        the epoch, and not on ranks, workers or micro-batches. Data with `sharded=True` are an
        exception.

    Raises:
        DataError: the dataset is empty, or cannot be read.
        ArgumentError: a number is not positive, `remainder` is unknown, or options exclude each
            other.

    Example:
        >>> data = Data(torch.arange(10), global_batch_size=4)
        >>> len(data), data.updates_per_epoch
        (10, 3)
    """

    dataset: Any
    global_batch_size: Any = option(None, _BATCH_SIZE)
    shuffle: bool = option(default=False, validator=truth())
    remainder: Literal["short", "pad", "drop"] = option(
        "short", one_of("short", "pad", "drop")
    )
    collate: Collate | None = option(None, _COLLATE)
    num_workers: int = option(0, _NUM_WORKERS)
    order: Order | OrderFunction | None = option(None, _ORDER)
    batch_sampler: Any = option(None)
    timeout: float = option(300.0, _TIMEOUT)
    fingerprint: str | None = option(None, _FINGERPRINT)
    sharded: bool = option(default=False, validator=truth())
    dispatch: bool = option(default=False, validator=truth())
    replay: bool = option(default=False, validator=truth())
    first: Any = attrs.field(default=None, init=False)
    """A stream's `state_dict()` before it is read; each epoch begins with this state."""

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
        """Create data that mixes samples of several datasets in proportion to weights.

        An epoch of the mix has as many samples as all datasets together. Since the start of the
        run, each dataset has its share of the samples, exact to one sample, after each block of
        64 positions (or more, for small weights). No sample of a dataset is repeated before all
        samples of that dataset were used.

        Args:
            datasets: map-style datasets. It must be possible to collate their samples into one
                batch.
            weights: a weight for each dataset; by default, its length.
            shuffle: whether to shuffle each dataset. Which dataset comes next is always random.
            options: the options of `Data`.

        Example:
            >>> data = Data.mix([range(3), range(10, 13)], weights=[2, 1], global_batch_size=6)
            >>> len(data)
            6
        """
        for name in ("batch_sampler", "order"):
            if name in options:
                msg = f"af.Data.mix({name}=...): the mix determines the order. Leave out {name}=."
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
        """Create data from a torch DataLoader; its batch size is the number of samples per update.

        accelfn uses the loader's dataset, batch size, sampler or batch sampler, drop_last,
        collate_fn, num_workers and timeout. With `shuffle=True`, accelfn shuffles itself, by the
        state's seed. Batches for a GPU go through pinned memory. accelfn warns if it ignores an
        option of the loader.

        Args:
            loader: a DataLoader of torch, or a StatefulDataLoader of torchdata.
            num_ranks: the number of ranks, if the loader's batch size is that of one rank.
            num_micro_batches: the number of micro-batches, if the loader's batch size is that of
                one micro-batch.

        Raises:
            DataError: the loader splits the samples among ranks, or makes no batches.
        """
        return cls(**_options_of(loader, num_ranks, num_micro_batches))

    @property
    def is_stream(self) -> bool:
        """Whether the dataset is a stream, which is read in order and not by index."""
        return is_stream(self.dataset)

    @cached_property
    def source(self) -> Source:
        """The object that reads samples by index."""
        return source_of(self.dataset)

    @cached_property
    def ordering(self) -> Order:
        """The order of the samples, for a dataset that is read by index."""
        if _is_order(self.order):
            return cast("Order", self.order)
        if self.order is not None:
            return Own(cast("OrderFunction", self.order))
        return Shuffled() if self.shuffle else Sequential()

    def __bool__(self) -> bool:
        """Return True; without this method, Python would call `__len__`."""
        return True

    def __len__(self) -> int:
        """Return the number of samples in an epoch.

        Raises:
            LengthError: the dataset is a stream without a length.
        """
        if self.is_stream:
            length = promised_length(self.dataset)
            if length is None or self.sharded:
                where = " over all ranks" if self.sharded else ""
                stream = f"the stream {type(self.dataset).__name__} has no known length{where}"
                msg = f"af.Data: {stream}. For a schedule, pass num_updates= instead."
                raise LengthError(msg)
            return length
        if self.batch_sampler is not None:
            return len(self.source)
        return self.ordering.num_samples(len(self.source))

    @property
    def updates_per_epoch(self) -> int:
        """The number of updates in an epoch.

        Raises:
            LengthError: the dataset is a stream without a length.
            DataError: the number may differ between epochs, because the batches have a token
                budget. Use `num_updates(epochs, seed=...)`.
        """
        if self.batch_sampler is not None:
            return len(self.batch_sampler)
        if isinstance(self.global_batch_size, token_budget):
            call = "af.Data(global_batch_size=af.token_budget(...)).updates_per_epoch"
            advice = "Call data.num_updates(epochs, seed=...)"
            msg = f"{call}: epochs may have different numbers of updates. {advice}."
            raise DataError(msg)
        return EvenCut(len(self), self.global_batch_size, self.remainder).num_batches(0)

    def num_updates(self, epochs: int, *, seed: int = 0) -> int:
        """Return the number of updates in a number of epochs, for a state with this seed.

        Raises:
            ArgumentError: `epochs` is not an integer of 0 or more.
        """
        check_integer("af.Data.num_updates", "epochs", epochs, 0)
        if isinstance(self.global_batch_size, token_budget):
            return sum(self.num_updates_of(i, seed=seed) for i in range(epochs))
        return epochs * self.updates_per_epoch

    def num_updates_of(self, epoch: int, *, seed: int, start: int = 0) -> int:
        """Return the number of updates from position `start` to the end of an epoch.

        Args:
            epoch: the number of the epoch, from 0.
            seed: the state's seed.
            start: the number of samples of the epoch that were read already.
        """
        if not start and self.batch_sampler is not None:
            return self.updates_per_epoch
        return self._cut_of(epoch, seed).num_batches(start)

    def _cut_of(self, epoch: int, seed: int) -> Cut:
        """Return how an epoch is cut into batches; compute its order only if that is needed."""
        if isinstance(self.global_batch_size, int):
            return EvenCut(len(self), self.global_batch_size, self.remainder)
        return self.epoch(seed=seed, number=epoch).cut

    def __repr__(self) -> str:
        """Return the dataset's type, length, order and batch size, without samples."""
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
        """Properties, such as the length, that must equal the saved ones when a run resumes."""
        name = self.fingerprint
        if not self.is_stream:
            name = name or fingerprint_of(self.source)
        return self.form | {"fingerprint": name}

    @property
    def form(self) -> dict[str, Any]:
        """The batch size, remainder, length and order, without reading samples."""
        size, sampler = self.global_batch_size, self.batch_sampler
        form: dict[str, Any] = {
            "batch_size": size if isinstance(size, int) else repr(size or "sampler"),
            "remainder": self.remainder,
        }
        if self.is_stream:
            return form
        order = self.ordering.name if sampler is None else type(sampler).__name__
        return form | {"samples": len(self), "order": order}

    @cached_property
    def looks(self) -> Looks | None:
        """Digests of a few samples, which ranks compare; None for a stream."""
        return None if self.is_stream else Looks(self.source)

    def in_order(self) -> "Data":
        """Return data for evaluation: each sample once, in the order of the dataset."""
        if self.is_stream:
            data = attrs.evolve(self, remainder="short")
            # keep the state from before any read
            object.__setattr__(data, "first", self.first)
            return data
        size = self.global_batch_size
        if self.batch_sampler is not None:  # use its largest batch's size
            spans = self.epoch(seed=0).cut.spans(0)
            size = max(stop - start for start, stop in spans)
        return attrs.evolve(
            self,
            global_batch_size=size,
            batch_sampler=None,
            shuffle=False,
            order=None,
            remainder="short",
        )

    def epoch(self, *, seed: int, number: int = 0) -> Epoch:
        """Return an epoch: the index of the sample at each position, and where batches end."""
        key, n = draws.key(seed, "data", number), len(self.source)
        budget, sampler = self.global_batch_size, self.batch_sampler
        if sampler is not None:
            flat, batches = read_batch_sampler(sampler, n, seed=seed, epoch=number)
            return Epoch(number, len(flat), order_of_array(flat), batches, key)
        size = None if isinstance(budget, token_budget) else budget
        order = self.ordering.of_epoch(n, seed=seed, epoch=number, batch_size=size)
        n = len(self)
        if size is not None:
            batches = EvenCut(n, size, self.remainder)
            sorts = getattr(self.ordering, "sorts", False)
            return Epoch(number, n, order, batches, key, sorts=sorts)
        epoch = Epoch(number, n, order, budget.cut(order(np.arange(n))), key)
        if getattr(self.ordering, "shuffles_batches", False):
            return epoch.shuffled_batches(draws.key(seed, "batches", number))
        return epoch

    def check_start(self, start: Cursor, *, seed: int) -> None:
        """Raise an error if reading cannot start at a cursor.

        Raises:
            BatchError: the cursor is after the last batch of its epoch.
            DataError: the stream cannot continue at the cursor.
        """
        place = f"sample {start.samples} of epoch {start.epoch}"
        if start.samples == 0:
            return
        if not self.is_stream:
            epoch_cut = self._cut_of(start.epoch, seed)
            if not epoch_cut.num_batches(start.samples):
                count = f"the batches of an epoch have only {epoch_cut.end(0)} samples"
                advice = "Was the dataset or its batch size changed?"
                msg = f"The cursor is at {place}, but {count} in all. {advice}"
                raise BatchError(msg)
        elif self.sharded and start.memory is None:
            msg = (
                f"af.Data(sharded=True): the cursor at {place} has no state of the ranks'"
                f" streams ({type(self.dataset).__name__}). Use the cursor of a batch or of a"
                " loaded state, because a cursor from af.seek never has such a state."
            )
            raise DataError(msg)
        elif not self.replay and start.memory is None:
            raise resume_error(self.dataset, start)
