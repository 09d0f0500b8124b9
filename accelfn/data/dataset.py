# SPDX-License-Identifier: Apache-2.0
"""`Data`: a dataset and the way training draws from it, as a value."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self, cast

import attrs
import numpy as np

from accelfn.base import words
from accelfn.base.arguments import check_integer, truth
from accelfn.base.calling import called
from accelfn.base.words import foreign
from accelfn.data.alike import Looks
from accelfn.data.batch import Batch
from accelfn.data.budget import budget
from accelfn.data.checks import (
    check_indexed,
    check_options,
    check_sample,
    check_stream,
    check_stream_start,
    is_batch_size,
    is_duration,
    is_num_workers,
    is_order,
    is_remainder,
    is_text,
)
from accelfn.data.cursor import Cursor
from accelfn.data.cut import Cut, EvenCut
from accelfn.data.device import on_device
from accelfn.data.epoch import Epoch, epoch_of
from accelfn.data.fetch import Collate
from accelfn.data.fingerprint import fingerprint_of, form_of
from accelfn.data.length import promised_length
from accelfn.data.loader import options_of
from accelfn.data.mixed import Joined, mixed
from accelfn.data.orders.order import (
    Order,
    OrderFunction,
    Own,
    Sequential,
    Shuffled,
)
from accelfn.data.readers import assembled
from accelfn.data.reading import Reading, pairs_of
from accelfn.data.sources import Source, source_of
from accelfn.data.stream import first_state, is_stream
from accelfn.errors import ArgumentError, DataError, LengthError

if TYPE_CHECKING:
    from torch.utils.data import DataLoader


def _flag() -> Any:
    return attrs.field(default=False, kw_only=True, validator=truth())


@called
@foreign(
    words.DATA,
    changes="make another af.Data(...)",
    iter=words.DATA_IS_NO_LOADER,
    getitem=words.DATA_IS_NO_LOADER,
)
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
        collate: makes a batch of a list of samples; default torch's. Where it leaves samples
            out, a loss that is a plain mean counts for too many beside those of other ranks
            and micro-batches, and is warned of.
        num_workers: processes that read ahead, of each rank; 0 reads in this one. More than
            it may use cores is said in an `af.Warning`, where reading begins.
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
    @called
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
        source, order = mixed(datasets, weights=weights, shuffle=shuffle)
        return cls(source, order=order, **options)

    @classmethod
    @called
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

    @called
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
        return assembled(pairs, reading.plan)

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
