# SPDX-License-Identifier: Apache-2.0
"""Plans: compute which samples of an update each rank takes, without reading data."""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, NoReturn, TypeAlias

import attrs
import numpy as np
import numpy.typing as npt
import torch

from accelfn.base import tree
from accelfn.base.arguments import integer, truth
from accelfn.base.hints import find_hint, hint_attributes
from accelfn.data.order import Indices, as_counts
from accelfn.errors import ArgumentError, BatchError, CallError, DataError

# Cut an epoch's positions into updates, without reading data.


Span: TypeAlias = tuple[int, int]
"""Positions `start` (included) to `stop` (excluded) of an epoch's order."""


@attrs.frozen
class EvenCut:
    """Batches of one size; the last batch may differ.

    Attributes:
        num_samples: samples of an epoch.
        batch_size: samples per update, over all ranks and micro-batches.
        remainder: how to treat a short last batch: "short", "pad" or "drop".
    """

    num_samples: int
    batch_size: int
    remainder: str = "short"

    @property
    def updates_per_epoch(self) -> int:
        """How many batches an epoch has."""
        return self.num_batches(0)

    def end(self, start: int) -> int:
        """Return the end of the batches from `start` on, without repeats.

        "drop" leaves out the samples of a short last batch.
        """
        if self.remainder != "drop":
            return self.num_samples
        rest = max(0, self.num_samples - start)
        return start + rest - rest % self.batch_size

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
    """Batches with an array of their ends, in rising order; the last end is the epoch's."""

    stops: npt.NDArray[np.int64]

    def end(self, start: int) -> int:
        """Return where the batches from `start` on end."""
        return int(self.stops[-1]) if len(self.stops) else 0

    def num_batches(self, start: int) -> int:
        """Return how many batches are left from position `start` on."""
        return len(self.stops) - int(np.searchsorted(self.stops, start, side="right"))

    def spans(self, start: int) -> Iterator[Span]:
        """Yield the batches from position `start` on; the first may be the rest of a batch."""
        first = len(self.stops) - self.num_batches(start)
        for stop in self.stops[first:].tolist():
            yield start, stop
            start = stop


Cut: TypeAlias = EvenCut | UnevenCut
"""An epoch's updates, as spans of its positions."""


def even_part(span: Span, index: int, count: int) -> Span:
    """Return part `index` of `count`; sizes differ by at most one, larger ones first."""
    start, stop = span
    size, longer = divmod(stop - start, count)
    begin = start + index * size + min(index, longer)
    return begin, begin + size + (index < longer)


@attrs.frozen(kw_only=True)
class Plan:
    """The parts of every batch, and the parts that this rank takes.

    A transform's `data` method maps one plan to another. Parts of one batch differ by at
    most one sample and may be empty. In rank order they form the batch.

    Attributes:
        world_rank: rank of the process.
        world_size: size of its world.
        rank: number of the share that this process takes.
        num_shares: number of shares of a batch; 1 until a transform shards it.
        num_micro_batches: number of parts of a share.
        micro_batch_size: instead, the most samples in a part.

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
        """Reject a share that does not exist."""
        if self.rank >= self.num_shares:
            msg = (
                f"af.Plan(rank={self.rank}, num_shares={self.num_shares}): the shares are 0"
                f" to {self.num_shares - 1}."
            )
            raise ArgumentError(msg)

    def sharded(self) -> "Plan":
        """Return the plan with a share of each batch for each rank of the world."""
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
        """Return the number of samples in each micro-batch of each share of a batch."""
        batch = (0, num_samples)
        count = len(self.parts(batch))
        shares = [even_part(batch, i, self.num_shares) for i in range(self.num_shares)]
        parts = [[even_part(share, i, count) for i in range(count)] for share in shares]
        return [tuple(stop - start for start, stop in spans) for spans in parts]


# The place of training in its data: an epoch, and the number of its samples seen.


@hint_attributes("setattr")
@attrs.frozen
class Cursor:
    """A position in the sample order, counted in global samples.

    It does not mention ranks, workers or micro-batches, so a run that is resumed on another
    number of them continues at exactly the same sample.

    Attributes:
        epoch: the number of the pass over the data, from 0.
        samples: how many samples of that epoch all ranks together have seen.
        memory: a stream's `state_dict()` there, as a tree of plain data and tensors; None for
            data with an index. It does not count in comparisons of cursors.
    """

    epoch: int = attrs.field(default=0, validator=integer(0, within=""))
    samples: int = attrs.field(default=0, validator=integer(0, within=""))
    memory: Any = attrs.field(default=None, eq=False, repr=False)

    @classmethod
    def reached(cls, epoch: int, samples: int) -> "Cursor":
        """Create a cursor of valid numbers, in half the time, because each update needs it."""
        cursor = object.__new__(cls)
        _set_epoch(cursor, epoch)
        _set_samples(cursor, samples)
        _set_memory(cursor, None)
        return cursor

    def to_plain(self) -> list[Any]:
        """Return the fields as plain data, to save or send; `Cursor(*plain)` restores them."""
        return [self.epoch, self.samples, self.memory]


# the slots' setters, without a look-up of names
_set_epoch, _set_samples, _set_memory = (
    vars(Cursor)[field.name].__set__ for field in attrs.fields(Cursor)
)


# `Batch`: the samples of one step, and their place in the data.


Filler: TypeAlias = bool | npt.NDArray[np.bool_]
"""Whether samples are filler: all of a micro-batch, none, or one by one."""


@hint_attributes("setattr", "getitem")
@attrs.frozen(kw_only=True, eq=False, slots=False)  # a dict is filled sooner than slots
class Batch:
    """This rank's share of one update's samples.

    Attributes:
        micro_batches: collated values on the world's device; a single value, unless the setup
            accumulates.
        weights: the number of samples that count in each; None counts all samples. An empty
            share has one sample that does not count, so that its rank takes part in every
            collective.
        start: the cursor before the batch; None for a batch of `af.lockstep`.
        cursor: the cursor after the batch.
        num_samples: samples of the batch, over all ranks and micro-batches.
        parts_indices: dataset indices of this rank's samples, an array per micro-batch.
        parts_filler: the samples that are filler: repeats that fill a padded batch, or the
            stand-in of an empty share.
        shares: returns the number of samples of each rank, in each of its micro-batches; None
            for unknown numbers.
        part: the number of the micro-batch, if this is one of `parts()`.
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
        """The collated value of the only micro-batch.

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
        """The number of the pass over the data, from 0."""
        return 0 if self.start is None else self.start.epoch

    @property
    def ends_epoch(self) -> bool:
        """Whether this is the last batch of its epoch."""
        if self.start is None or self.cursor is None:
            return False
        return self.cursor.epoch > self.start.epoch

    @property
    def indices(self) -> torch.Tensor:
        """Dataset indices of this rank's samples, in the order of the values."""
        return torch.from_numpy(np.concatenate(self.parts_indices))

    @property
    def filler(self) -> torch.Tensor:
        """Whether each of these samples is filler, as booleans."""
        masks = [
            np.broadcast_to(np.asarray(filler, bool), len(indices))
            for indices, filler in zip(
                self.parts_indices, self.parts_filler, strict=True
            )
        ]
        return torch.from_numpy(np.concatenate(masks))

    @classmethod
    def __torch_function__(cls, *_: object) -> NoReturn:
        """Raise, because a batch is not a tensor, as in model(batch)."""
        msg = f"A Batch is no tensor: {find_hint('Batch', '__getitem__')}."
        raise CallError(msg)

    def parts(self) -> list["Batch"]:
        """Return a batch for each micro-batch."""
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
        """Add tensors that belong to the samples: each value becomes (value, *extras).

        Args:
            extras: trees of tensors with a row for each of this rank's samples, in the order
                of `indices`, which also has the stand-in of an empty share.

        Raises:
            BatchError: there are more rows, or fewer.
        """
        sizes = [len(indices) for indices in self.parts_indices]
        counts = {tree.num_rows(extra) for extra in extras}
        if counts != {sum(sizes)}:
            msg = (
                f"batch.zip: the extras have {sorted(counts)} rows; expected one for each of"
                f" this rank's {sum(sizes)} samples, as in table[batch.indices]."
            )
            raise BatchError(msg)
        spans = pairwise([0, *accumulate(sizes)])
        values = tuple(
            (value, *(tree.rows(extra, *span) for extra in extras))
            for value, span in zip(self.micro_batches, spans, strict=True)
        )
        return attrs.evolve(self, micro_batches=values)

    def __repr__(self) -> str:
        """Show the place of the batch, not its tensors."""
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

    Write `af.Data(batch_size=af.budget(lengths, limit=4096))`. With
    `order=af.orders.bucketed(lengths)` there is little padding.

    Args:
        costs: the cost of each sample, for example its number of tokens.
        limit: the largest cost of an update, over all ranks and micro-batches.
        padded: whether a batch costs its longest sample times the number of samples, because
            it is padded; else it costs the sum.

    Law: every sample comes once per epoch, no batch costs more than the limit, and no batch
    could also take the next sample.

    Cost: 8 bytes for each sample; an epoch begins with a pass over the costs.

    Raises:
        ArgumentError: costs are not integers of 0 or more, or the limit is not positive.
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
        """Return the ends of batches of samples in this order."""
        costs = self.costs[indices]
        stops: list[int] = []
        start, guess = 0, 64
        while start < len(costs):
            count = self._count_fitting(costs[start : start + guess])
            if count == guess and start + count < len(costs):
                guess *= 2  # perhaps more would fit
                continue
            start += count
            stops.append(start)
            guess = max(64, 2 * count)
        return UnevenCut(np.array(stops, np.int64))

    def _count_fitting(self, costs: Indices) -> int:
        """Return how many of these samples, from the first on, fit together."""
        limit = min(self.limit, np.iinfo(np.int64).max)
        if self.padded:  # a division, because a product may exceed 64 bits
            longest = np.maximum(np.maximum.accumulate(costs), 1)
            beyond = np.arange(1, len(costs) + 1) > limit // longest
        else:  # the first sum that exceeds 64 bits is negative
            spent = np.cumsum(costs)
            beyond = (spent > limit) | (spent < 0)
        return int(beyond.argmax()) if beyond.any() else len(costs)
