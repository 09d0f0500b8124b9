# SPDX-License-Identifier: Apache-2.0
"""Plans: compute which samples of an update each rank takes, without reading data."""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, NoReturn, Protocol, TypeAlias

import attrs
import numpy as np
import numpy.typing as npt
import torch

from accelfn.base import tree
from accelfn.base.arguments import integer, truth
from accelfn.base.hints import find_hint, hint_attributes
from accelfn.data.order import Indices, as_counts
from accelfn.errors import ArgumentError, BatchError, CallError, DataError

# Where an epoch's positions are cut into updates: arithmetic, before anything is read.


Span: TypeAlias = tuple[int, int]
"""Positions `start` (included) to `stop` (excluded) of an epoch's order."""


class Cut(Protocol):
    """An epoch's updates, as spans of its positions."""

    def end(self, start: int) -> int:
        """Return where the epoch's own samples end that batches from `start` on have."""
        ...

    def num_batches(self, start: int) -> int:
        """Return how many batches are left from position `start` on."""
        ...

    def spans(self, start: int) -> Iterator[Span]:
        """Yield the batches from position `start` on."""
        ...


@attrs.frozen
class EvenCut:
    """Batches of one size; the last may be another.

    Attributes:
        num_samples: in an epoch.
        batch_size: samples per update, over all ranks and micro-batches.
        remainder: what becomes of a short last batch: "short", "pad" or "drop".
    """

    num_samples: int
    batch_size: int
    remainder: str = "short"

    @property
    def updates_per_epoch(self) -> int:
        """How many batches an epoch has."""
        if self.remainder == "drop":
            return self.num_samples // self.batch_size
        return -(-self.num_samples // self.batch_size)

    def end(self, start: int) -> int:
        """Return where the epoch's own samples end that batches from `start` on have.

        That is the end of all, but with "drop", where those of a short batch are left out.
        """
        if self.remainder != "drop":
            return self.num_samples
        left = max(0, self.num_samples - start)
        return start + left - left % self.batch_size

    def num_batches(self, start: int) -> int:
        """Return how many batches are left from position `start` on."""
        return max(0, -(-(self.end(start) - start) // self.batch_size))

    def spans(self, start: int) -> Iterator[Span]:
        """Yield the batches from position `start` on; a padded one goes beyond the end."""
        end = self.end(start)
        while start < end:
            stop = start + self.batch_size
            yield start, (stop if self.remainder == "pad" else min(stop, end))
            start = stop


@attrs.frozen(eq=False)
class UnevenCut:
    """Batches that end where an array says, in rising order; the last ends the epoch."""

    stops: npt.NDArray[np.int64]

    def end(self, start: int) -> int:
        """Return where the batches from `start` on end."""
        return int(self.stops[-1]) if len(self.stops) else 0

    def num_batches(self, start: int) -> int:
        """Return how many batches are left from position `start` on."""
        return len(self.stops) - int(np.searchsorted(self.stops, start, side="right"))

    def spans(self, start: int) -> Iterator[Span]:
        """Yield the batches from position `start` on; the first may be the rest of one."""
        first = len(self.stops) - self.num_batches(start)
        for stop in self.stops[first:].tolist():
            yield start, stop
            start = stop


def even_part(span: Span, index: int, count: int) -> Span:
    """Return part `index` of `count`; sizes differ by at most one, larger ones first."""
    start, stop = span
    size, longer = divmod(stop - start, count)
    begin = start + index * size + min(index, longer)
    return begin, begin + size + (index < longer)


@attrs.frozen(kw_only=True)
class Plan:
    """How every batch is cut, and which parts this rank takes.

    A transform's `data` method maps one plan to another. Parts of one batch differ by at
    most one sample and may be empty; together, in rank order, they are the batch.

    Attributes:
        world_rank: of the process.
        world_size: of its world.
        rank: which share this process takes.
        num_shares: how many shares a batch is cut into; 1 until something shards it.
        num_micro_batches: how many parts a share is cut into.
        micro_batch_size: instead: at most so many samples in a part.

    Example:
        >>> Plan(rank=1, num_shares=3).parts((0, 10))
        [(4, 7)]
    """

    world_rank: int = attrs.field(default=0, validator=integer(0))
    world_size: int = attrs.field(default=1, validator=integer(1))
    rank: int = attrs.field(default=0, validator=integer(0))
    num_shares: int = attrs.field(default=1, validator=integer(1))
    num_micro_batches: int = attrs.field(default=1, validator=integer(1))
    micro_batch_size: int | None = attrs.field(
        default=None, validator=attrs.validators.optional(integer(1))
    )

    def __attrs_post_init__(self) -> None:
        """Refuse a share that is none of those."""
        if self.rank >= self.num_shares:
            msg = (
                f"af.Plan(rank={self.rank}, num_shares={self.num_shares}): the shares are 0"
                f" to {self.num_shares - 1}."
            )
            raise ArgumentError(msg)

    def sharded(self) -> "Plan":
        """Return the plan with batches cut into one share a rank of the world."""
        return attrs.evolve(self, rank=self.world_rank, num_shares=self.world_size)

    def parts(self, batch: Span) -> list[Span]:
        """Return this rank's micro-batches of a global batch."""
        share, count = batch, self.num_micro_batches
        if self.num_shares > 1:
            share = even_part(batch, self.rank, self.num_shares)
        if self.micro_batch_size is not None:
            largest = -(-(batch[1] - batch[0]) // self.num_shares)
            count = max(1, -(-largest // self.micro_batch_size))
        if count == 1:
            return [share]
        return [even_part(share, i, count) for i in range(count)]

    def counts(self, num_samples: int) -> list[tuple[int, ...]]:
        """Return how many samples each share has of a batch, in each of its micro-batches."""
        batch, places = (0, num_samples), range(len(self.parts((0, num_samples))))
        shares = [even_part(batch, i, self.num_shares) for i in range(self.num_shares)]
        parts = [[even_part(share, i, len(places)) for i in places] for share in shares]
        return [tuple(stop - start for start, stop in each) for each in parts]


# Where training stands in its data: an epoch and how many of its samples were seen.


@hint_attributes("setattr")
@attrs.frozen
class Cursor:
    """A position in the sample order, counted in global samples.

    It does not mention ranks, workers or micro-batches, so a run resumed on another
    number of them goes on at the very same sample.

    Attributes:
        epoch: which pass over the data, from 0.
        samples: how many samples of that epoch all ranks together have seen.
        memory: what a stream's own `state_dict()` said there, as a tree of plain data and
            tensors; None for what is read by index. Two cursors at one place are equal.
    """

    epoch: int = attrs.field(default=0, validator=integer(0, within=""))
    samples: int = attrs.field(default=0, validator=integer(0, within=""))
    memory: Any = attrs.field(default=None, eq=False, repr=False)

    @classmethod
    def reached(cls, epoch: int, samples: int) -> "Cursor":
        """Return one of numbers that were counted here: at each update, in half of the time."""
        made = object.__new__(cls)
        _set_epoch(made, epoch)
        _set_samples(made, samples)
        _set_memory(made, None)
        return made

    def to_plain(self) -> list[Any]:
        """Return its fields as plain data, to be saved or sent; `Cursor(*plain)` is it."""
        return [self.epoch, self.samples, self.memory]


# of a class with slots, what sets one is there without a name to be looked up
_set_epoch, _set_samples, _set_memory = (
    vars(Cursor)[each.name].__set__ for each in attrs.fields(Cursor)
)


# `Batch`: what one step consumes, with the place it has in the data.


Filler: TypeAlias = bool | npt.NDArray[np.bool_]
"""Whether samples are filler: all of a micro-batch, none, or one by one."""


@hint_attributes("setattr", "getitem")
@attrs.frozen(kw_only=True, eq=False, slots=False)  # a dict is filled sooner than slots
class Batch:
    """This rank's share of one update's samples.

    Attributes:
        micro_batches: collated values on the world's device; one, unless the setup
            accumulates.
        weights: how many samples count in each; None: as many as it has. An empty share
            holds one sample that does not count, so that its rank takes part in every
            collective.
        start: where the data stood before it; None for one that `af.lockstep` made.
        cursor: where it stands after it.
        num_samples: of the whole batch, over all ranks and micro-batches.
        parts_indices: dataset indices of this rank's samples, one array a micro-batch.
        parts_filler: which of them are filler: repeats that fill a padded batch, or the
            stand-in of an empty share.
        shares: returns how many samples each rank has, in each of its micro-batches; None
            for unknown numbers.
        part: which micro-batch of the batch this is, if it is one of `parts()`.
    """

    micro_batches: tuple[Any, ...]
    weights: tuple[int | None, ...]
    start: Cursor | None
    cursor: Cursor | None
    num_samples: int
    parts_indices: tuple[Indices, ...]
    parts_filler: tuple[Filler, ...]
    shares: Callable[[], Sequence[Sequence[int | None]]] | None = None
    part: int = 0

    @property
    def value(self) -> Any:
        """The one collated value.

        Raises:
            BatchError: the setup accumulates, so there are several.
        """
        if len(self.micro_batches) != 1:
            msg = (
                f"This batch has {len(self.micro_batches)} micro-batches: read"
                " batch.micro_batches."
            )
            raise BatchError(msg)
        return self.micro_batches[0]

    @property
    def epoch(self) -> int:
        """Which pass over the data it belongs to, from 0."""
        return 0 if self.start is None else self.start.epoch

    @property
    def ends_epoch(self) -> bool:
        """Whether it is the last of its epoch."""
        if self.start is None or self.cursor is None:
            return False
        return self.cursor.epoch > self.start.epoch

    @property
    def indices(self) -> torch.Tensor:
        """Dataset indices of this rank's samples, in the order of the values."""
        return torch.from_numpy(np.concatenate(self.parts_indices))

    @property
    def filler(self) -> torch.Tensor:
        """Which of those samples are filler, as booleans."""
        masks = [
            np.broadcast_to(np.asarray(filler, bool), len(indices))
            for indices, filler in zip(
                self.parts_indices, self.parts_filler, strict=True
            )
        ]
        return torch.from_numpy(np.concatenate(masks))

    @classmethod
    def __torch_function__(cls, *_: object) -> NoReturn:
        """Refuse to be a tensor, as in model(batch)."""
        msg = f"A Batch is no tensor: {find_hint('Batch', '__getitem__')}."
        raise CallError(msg)

    def parts(self) -> list["Batch"]:
        """Return one batch a micro-batch."""
        return [
            attrs.evolve(
                self,
                micro_batches=(self.micro_batches[i],),
                weights=(self.weights[i],),
                parts_indices=(self.parts_indices[i],),
                parts_filler=(self.parts_filler[i],),
                part=self.part + i,
            )
            for i in range(len(self.micro_batches))
        ]

    def zip(self, *extras: Any) -> "Batch":
        """Return the batch with tensors that belong to its samples: (value, *extras).

        They are cut with it into micro-batches.

        Args:
            extras: trees of tensors with a row for each of this rank's samples, in the order
                of `indices`, which has the stand-in of an empty share too.

        Raises:
            BatchError: there are more rows, or fewer.
        """
        sizes = [len(each) for each in self.parts_indices]
        found, wanted = {tree.num_rows(each) for each in extras}, sum(sizes)
        if found != {wanted}:
            msg = (
                f"batch.zip: the extras have {sorted(found)} rows; expected one for each of"
                f" this rank's {wanted} samples, as in table[batch.indices]."
            )
            raise BatchError(msg)
        spans = pairwise([0, *accumulate(sizes)])
        values = tuple(
            (value, *(tree.rows(extra, *span) for extra in extras))
            for value, span in zip(self.micro_batches, spans, strict=True)
        )
        return attrs.evolve(self, micro_batches=values)

    def __repr__(self) -> str:
        """Show its place, not its tensors."""
        if self.start is None:
            return f"<Batch of a stream, {len(self.micro_batches)} micro-batches>"
        return (
            f"<Batch of {self.num_samples} samples, {sum(w or 0 for w in self.weights)} here"
            f" in {len(self.micro_batches)} micro-batches, epoch {self.epoch} from sample"
            f" {self.start.samples}>"
        )


# Batches of as many samples as fit a budget, such as a number of tokens.


def _as_costs(values: Any) -> Indices:
    return as_counts(values, "af.budget(costs)")


@attrs.frozen(eq=False, repr=False)
class budget:
    """Let an update take as many samples, in their order, as fit a limit.

    Give it as `af.Data(batch_size=af.budget(lengths, limit=4096))`; with
    `order=af.orders.bucketed(lengths)` little is padding.

    Args:
        costs: of each sample: its tokens, say.
        limit: of an update, over all ranks and micro-batches.
        padded: whether a batch costs its longest sample times their number, as one that is
            padded does, or the sum.

    Law: every sample comes once an epoch, no batch costs more than the limit, and none could
    take the next sample too.

    Cost: 8 bytes a sample; an epoch begins with a pass over the costs.

    Raises:
        ArgumentError: costs are no counts, or the limit is not positive.
        DataError: a sample alone costs more than the limit.
    """

    costs: Indices = attrs.field(converter=_as_costs)
    limit: int = attrs.field(validator=integer(1), kw_only=True)
    padded: bool = attrs.field(default=True, validator=truth(), kw_only=True)

    def __attrs_post_init__(self) -> None:
        """Check that every sample fits."""
        large = np.flatnonzero(self.costs > self.limit)
        if len(large):
            first = int(large[0])
            msg = (
                f"af.budget(limit={self.limit}): sample {first} alone costs"
                f" {self.costs[first]}; too large are {len(large)} of {len(self.costs)}"
                " samples. Leave them out, cut them, or take a larger limit."
            )
            raise DataError(msg)

    def __repr__(self) -> str:
        """Show the limit, not the costs."""
        return f"a budget of {self.limit}"

    def check(self, n: int) -> None:
        """Raise unless there is a cost for each of n samples."""
        if len(self.costs) != n:
            msg = f"af.budget: {len(self.costs)} costs for a dataset of {n} samples."
            raise DataError(msg)

    def cut(self, indices: Indices) -> UnevenCut:
        """Return where batches end, of samples that come in this order."""
        costs = self.costs[indices]
        stops: list[int] = []
        start, guess = 0, 64
        while start < len(costs):
            taken = self._fitting(costs[start : start + guess])
            if taken == guess and start + taken < len(costs):
                guess *= 2  # perhaps more would fit
                continue
            start += taken
            stops.append(start)
            guess = max(64, 2 * taken)
        return UnevenCut(np.array(stops, np.int64))

    def _fitting(self, costs: Indices) -> int:
        """Return how many of these, from the first on, fit together."""
        limit = min(self.limit, np.iinfo(np.int64).max)
        if self.padded:  # divided, for a product may be beyond 64 bits
            longest = np.maximum(np.maximum.accumulate(costs), 1)
            beyond = np.arange(1, len(costs) + 1) > limit // longest
        else:  # the first sum that is beyond 64 bits has their sign
            spent = np.cumsum(costs)
            beyond = (spent > limit) | (spent < 0)
        return int(beyond.argmax()) if beyond.any() else len(costs)
