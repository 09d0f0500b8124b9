# SPDX-License-Identifier: Apache-2.0
"""Plans and epochs: the samples of each update, their order, and each rank's share of them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, NoReturn, TypeAlias

import attrs
import numpy as np
import numpy.typing as npt
import torch

from accelfn.base import tree
from accelfn.base.arguments import find_hint, hint_attributes, integer, truth
from accelfn.data.order import (
    AtPositions,
    Indices,
    as_counts,
    check_indices,
    order_of_array,
    read_sampler,
    shuffle_positions,
)
from accelfn.errors import ArgumentError, BatchError, CallError, DataError
from accelfn.world import World

# Cut the positions of an epoch into the batches of its updates, without reading data.


Span: TypeAlias = tuple[int, int]
"""A range of positions in an epoch's order, from `start` (included) to `stop` (excluded)."""


@attrs.frozen
class EvenCut:
    """Batches of equal size; only the last batch of an epoch may be shorter.

    Attributes:
        num_samples: the number of samples in an epoch.
        batch_size: the number of samples per update, over all ranks and micro-batches.
        remainder: how to treat a short last batch: "short", "pad" or "drop".
    """

    num_samples: int
    batch_size: int
    remainder: str = "short"

    def end(self, start: int) -> int:
        """Return the end position of the last batch, if batches are cut from `start` on.

        Repeats of a padded batch do not count. With "drop", a short last batch is left out.
        """
        if self.remainder != "drop":
            return self.num_samples
        rest = max(0, self.num_samples - start)
        return start + rest - rest % self.batch_size

    def num_batches(self, start: int) -> int:
        """Return the number of batches from position `start` on."""
        return max(0, -(-(self.end(start) - start) // self.batch_size))

    def spans(self, start: int) -> Iterator[Span]:
        """Yield the batches from `start` on; a padded batch may end after the epoch's end."""
        end = self.end(start)
        while start < end:
            stop = start + self.batch_size
            yield start, (stop if self.remainder == "pad" else min(stop, end))
            start = stop


@attrs.frozen(eq=False)
class UnevenCut:
    """Batches of different sizes, given by an array of their end positions in rising order."""

    stops: npt.NDArray[np.int64]

    def end(self, start: int) -> int:
        """Return the end position of the epoch."""
        return int(self.stops[-1]) if len(self.stops) else 0

    def num_batches(self, start: int) -> int:
        """Return the number of batches from position `start` on."""
        return len(self.stops) - int(np.searchsorted(self.stops, start, side="right"))

    def spans(self, start: int) -> Iterator[Span]:
        """Yield the batches from `start` on; the first may be only the rest of a batch."""
        first = len(self.stops) - self.num_batches(start)
        for stop in self.stops[first:].tolist():
            yield start, stop
            start = stop


Cut: TypeAlias = EvenCut | UnevenCut
"""How the positions of an epoch are cut into the batches of its updates."""


def even_part(span: Span, index: int, count: int) -> Span:
    """Return one of `count` nearly equal parts of a span: sizes differ by at most one.

    Larger parts come first.
    """
    start, stop = span
    size, longer = divmod(stop - start, count)
    begin = start + index * size + min(index, longer)
    return begin, begin + size + (index < longer)


@attrs.frozen(kw_only=True)
class Plan:
    """How every batch is divided into shares and micro-batches, and which share is this rank's.

    A transform's method `data` returns a plan, given another plan. The shares of a batch differ
    by at most one sample, and may be empty. Concatenated in rank order, the shares are the
    batch. In the same way, a share is divided into micro-batches.

    Attributes:
        world_rank: the rank of this process.
        world_size: the number of ranks in the world.
        rank: the number of this rank's share.
        num_shares: the number of shares of a batch. It is 1 until a transform splits batches.
        num_micro_batches: the number of micro-batches of a share.
        micro_batch_size: the largest number of samples in a micro-batch. If it is given, it
            determines the number of micro-batches.

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
        """Check that this rank's share exists."""
        if self.rank >= self.num_shares:
            call = f"af.typing.Plan(rank={self.rank}, num_shares={self.num_shares})"
            msg = f"{call}: expected a rank from 0 to {self.num_shares - 1}."
            raise ArgumentError(msg)

    def sharded(self) -> "Plan":
        """Return a plan with one share of each batch for each rank of the world."""
        return attrs.evolve(self, rank=self.world_rank, num_shares=self.world_size)

    def parts(self, batch: Span) -> list[Span]:
        """Return this rank's micro-batches, as spans, from the span of a whole batch."""
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
        """Return the number of samples in each micro-batch, for each share of a batch."""
        batch = (0, num_samples)
        count = len(self.parts(batch))
        shares = [even_part(batch, i, self.num_shares) for i in range(self.num_shares)]
        parts = [[even_part(share, i, count) for i in range(count)] for share in shares]
        return [tuple(stop - start for start, stop in spans) for spans in parts]


# The position of training in its data: an epoch, and the number of its samples seen so far.


@hint_attributes("setattr")
@attrs.frozen
class Cursor:
    """A position in the data, counted in samples of all ranks.

    The position does not depend on ranks, workers or micro-batches. So a run can be resumed on
    another number of ranks, and continues at exactly the same sample.

    Attributes:
        epoch: the number of the pass over the data, from 0.
        samples: how many samples of that epoch all ranks together have seen.
        memory: a stream's `state_dict()` at this position, as a tree of plain data and tensors;
            None for data with an index. `==` ignores it.
    """

    epoch: int = attrs.field(default=0, validator=integer(0, within=""))
    samples: int = attrs.field(default=0, validator=integer(0, within=""))
    memory: Any = attrs.field(default=None, eq=False, repr=False)

    @classmethod
    def reached(cls, epoch: int, samples: int) -> "Cursor":
        """Create a cursor without checking the numbers, which takes half the time."""
        cursor = object.__new__(cls)
        _set_epoch(cursor, epoch)
        _set_samples(cursor, samples)
        _set_memory(cursor, None)
        return cursor

    def to_plain(self) -> list[Any]:
        """Return the fields as plain data, to save or send; `Cursor(*plain)` is the cursor."""
        return [self.epoch, self.samples, self.memory]


# functions that set the fields without a look-up of their names, for speed
_set_epoch, _set_samples, _set_memory = (
    vars(Cursor)[field.name].__set__ for field in attrs.fields(Cursor)
)


# `Batch`: the samples of one step, and their position in the data.


Filler: TypeAlias = bool | npt.NDArray[np.bool_]
"""Whether the samples of a micro-batch are filler: for all of them, or for each."""


@hint_attributes("setattr", "getitem")
@attrs.frozen(kw_only=True, eq=False, slots=False)  # without `__slots__`, for speed
class Batch:
    """This rank's share of one update's samples.

    Attributes:
        micro_batches: the collated micro-batches, on the world's device. There is only one,
            unless the setup has `af.accumulate`.
        weights: for each micro-batch, the number of its samples that count; None if all count.
            If this rank's share is empty, it has one sample that does not count (filler), so
            that the rank still joins every collective.
        start: the cursor before the batch; None for a batch of `af.join_uneven`.
        cursor: the cursor after the batch.
        num_samples: the number of samples in the batch, over all ranks and micro-batches.
        parts_indices: for each micro-batch, an array of its samples' dataset indices.
        parts_filler: for each micro-batch, which samples are filler. Filler is a repeated sample
            in a padded batch, or the sample of an empty share.
        shares: a function that returns, for each rank, the number of samples in each of its
            micro-batches; None if the numbers are unknown.
        part: the number of the micro-batch, if the batch was returned by `parts()`.
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
        """The collated value of the batch, if it has only one micro-batch.

        Raises:
            BatchError: there are several micro-batches, because the setup has `af.accumulate`.
        """
        if len(self.micro_batches) != 1:
            count = len(self.micro_batches)
            msg = f"batch.value: the batch has {count} micro-batches. Use batch.micro_batches."
            raise BatchError(msg)
        return self.micro_batches[0]

    @property
    def epoch(self) -> int:
        """The number of the pass over the data, from 0."""
        return 0 if self.start is None else self.start.epoch

    @property
    def ends_epoch(self) -> bool:
        """Whether this is the last batch of its epoch."""
        return self.cursor is not None and self.cursor.epoch > self.epoch

    @property
    def indices(self) -> torch.Tensor:
        """The dataset indices of this rank's samples, in the order of the batch."""
        return torch.from_numpy(np.concatenate(self.parts_indices))

    @property
    def filler(self) -> torch.Tensor:
        """Which of this rank's samples are filler, as a tensor of booleans."""
        parts = zip(self.parts_indices, self.parts_filler, strict=True)
        masks = [np.full(len(indices), filler) for indices, filler in parts]
        return torch.from_numpy(np.concatenate(masks))

    @classmethod
    def __torch_function__(cls, *_: object) -> NoReturn:
        """Raise `CallError`, because the batch was used as a tensor, as in `model(batch)`."""
        msg = f"A Batch is not a tensor: {find_hint('Batch', '__getitem__')}."
        raise CallError(msg)

    def note_stand_ins(self, world: World) -> "Batch":
        """Register the filler of empty shares, and return the batch.

        If the user later passes `batch.value` to a step, the step can then raise an error,
        because the value alone does not show that its weight is 0.
        """
        for value, weight in zip(self.micro_batches, self.weights, strict=True):
            if weight == 0:
                world.connection.activity.stand_ins.append(value)
        return self

    def parts(self) -> list["Batch"]:
        """Return a `Batch` for each micro-batch."""
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
        """Return the batch with more tensors: each micro-batch becomes (value, *extras).

        Args:
            extras: trees of tensors with one row for each of this rank's samples, in the order
                of `indices`. Filler needs a row too.

        Raises:
            BatchError: the number of rows is not the number of samples.
        """
        sizes = [len(indices) for indices in self.parts_indices]
        counts = {tree.num_rows(extra) for extra in extras}
        if counts != {sum(sizes)}:
            rows = " and ".join(map(str, sorted(counts))) or "no"
            reason = (
                f"the extras have {rows} rows, but this rank has {sum(sizes)} samples"
            )
            msg = f"batch.zip: {reason}. Pass a row for each, such as table[batch.indices]."
            raise BatchError(msg)
        spans = pairwise([0, *accumulate(sizes)])
        values = tuple(
            (value, *(tree.rows(extra, *span) for extra in extras))
            for value, span in zip(self.micro_batches, spans, strict=True)
        )
        return attrs.evolve(self, micro_batches=values)

    def __repr__(self) -> str:
        """Return the position and the size of the batch, without its tensors."""
        if self.start is None:
            return f"<Batch of a stream, {len(self.micro_batches)} micro-batches>"
        return (
            f"<Batch of {self.num_samples} samples, {sum(w or 0 for w in self.weights)} here"
            f" in {len(self.micro_batches)} micro-batches, epoch {self.epoch} from sample"
            f" {self.start.samples}>"
        )


# `token_budget`: batches of as many samples as fit into a budget, such as a number of tokens.


@attrs.frozen(eq=False, repr=False)
class token_budget:
    """Put as many samples into each batch, in order, as fit into a budget.

    Write `af.Data(global_batch_size=af.token_budget(lengths, limit=4096))`. Add
    `order=af.orders.bucketed(lengths)` for little padding.

    Args:
        costs: the cost of each sample, for example its number of tokens.
        limit: the largest cost of an update, over all ranks and micro-batches.
        padded: whether batches are padded. Then a batch costs the cost of its most expensive
            sample times its number of samples. Otherwise it costs the sum.

    Law: an epoch has every sample once. No batch costs more than the limit, or would still fit
    with the next sample added.

    Cost: 8 bytes for each sample. Each epoch starts with a pass over all costs.

    Raises:
        ArgumentError: costs are not integers of 0 or more, or the limit is not positive.
        DataError: a single sample costs more than the limit.
    """

    costs: Indices = attrs.field(
        converter=partial(as_counts, where="af.token_budget(costs)")
    )
    limit: int = attrs.field(validator=integer(1), kw_only=True)
    padded: bool = attrs.field(default=True, validator=truth(), kw_only=True)

    def __attrs_post_init__(self) -> None:
        """Check that no sample costs more than the limit."""
        large = np.flatnonzero(self.costs > self.limit)
        if len(large):
            first = int(large[0])
            cost = f"sample {first} costs {self.costs[first]}, and {len(large)} of"
            reason = f"{cost} {len(self.costs)} samples cost more than the limit"
            advice = "Remove or truncate them, or pass a larger limit"
            msg = f"af.token_budget(limit={self.limit}): {reason}. {advice}."
            raise DataError(msg)

    def __repr__(self) -> str:
        """Return the limit as text, without the costs."""
        return f"a budget of {self.limit}"

    def cut(self, indices: Indices) -> UnevenCut:
        """Return how samples in this order are cut into batches."""
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
        """Return how many samples, counted from the first, fit into one batch."""
        limit = min(self.limit, np.iinfo(np.int64).max)
        if self.padded:  # divide, because a product could exceed 64 bits
            longest = np.maximum(np.maximum.accumulate(costs), 1)
            beyond = np.arange(1, len(costs) + 1) > limit // longest
        else:  # a sum that exceeds 64 bits is negative
            spent = np.cumsum(costs)
            beyond = (spent > limit) | (spent < 0)
        return int(beyond.argmax()) if beyond.any() else len(costs)


# Epochs: the dataset index at each position, and the batch of each update.


_FIRST_BLOCK, _BLOCK, _UPDATES = 1_024, 65_536, 2_048
"""Order is computed in blocks: this rank's positions in the first block and in later blocks, and
the largest number of updates in a block."""
_MOST_SORTED = 1 << 22
"""The most positions of all ranks in a block, for an order that must sort all of them."""


@attrs.frozen(eq=False)
class Epoch:
    """One pass over the data.

    Attributes:
        number: the epoch's number, from 0.
        num_samples: the number of positions.
        order: a function from positions to dataset indices.
        cut: how the positions are cut into batches.
        key: the key of the epoch's random numbers.
        sorts: whether the order must compute more positions than the requested ones.
    """

    number: int
    num_samples: int
    order: AtPositions
    cut: Cut
    key: int
    sorts: bool = False

    def shuffled_batches(self, key: int) -> "Epoch":
        """Return the epoch with its batches in a random order; the last batch stays last."""
        stops = [stop for _, stop in self.cut.spans(0)]
        batches = np.split(self.order(np.arange(self.num_samples)), stops[:-1])
        count = len(batches) - 1
        turns = shuffle_positions(np.arange(count), n=max(count, 1), key=key)
        batches[:count] = [batches[turn] for turn in turns]
        ends = np.cumsum([len(batch) for batch in batches])
        order = order_of_array(np.concatenate(batches))
        return attrs.evolve(self, order=order, cut=UnevenCut(ends))


def read_batch_sampler(
    sampler: Any, n: int, *, seed: int, epoch: int
) -> tuple[Indices, UnevenCut]:
    """Read an epoch from a batch sampler for n samples: the indices, and their batches.

    Raises:
        DataError: the sampler yields something else than lists of indices, or an empty list.
    """
    name = f"batch_sampler ({type(sampler).__name__})"
    batches = read_sampler(sampler, seed=seed, epoch=epoch)
    wrong = [batch for batch in batches if not isinstance(batch, list)]
    if wrong:
        msg = f"{name} yielded {wrong[0]!r}; expected a list of indices per update."
        raise DataError(msg)
    if not batches or [] in batches:
        update = batches.index([]) if batches else 0
        msg = f"{name} yielded no indices for update {update}: yield at least 1."
        raise DataError(msg)
    indices = np.concatenate([np.asarray(batch) for batch in batches])
    stops = np.cumsum([len(batch) for batch in batches])
    return check_indices(indices, n=n, where=name), UnevenCut(stops)


class Portion(NamedTuple):
    """The samples that a rank reads for one update.

    The class is a named tuple, because each update creates one, and that takes half the time
    of an attrs record.

    Attributes:
        start: the cursor before the update.
        after: the cursor after the update.
        num_samples: the number of samples in the update, on all ranks.
        spans: the positions of each of this rank's micro-batches.
        indices: the dataset indices to read for each micro-batch. An empty micro-batch reads
            one sample as filler.
        own: the number of positions in the epoch. Later positions, in a padded batch, repeat
            samples of the epoch's start.
        key: the key of random numbers.
        shares: the numbers of samples of each rank, if ranks have exchanged them; else None.
    """

    start: Cursor
    after: Cursor
    num_samples: int
    spans: tuple[Span, ...]
    indices: tuple[Indices, ...]
    own: int
    key: int
    shares: list[tuple[int, ...]] | None = None


Pair: TypeAlias = tuple[Portion, list[Any]]
"""This rank's portion of an update, and the collated values of its micro-batches."""


def portions(epoch: Epoch, plan: Plan, start: Cursor) -> Iterator[Portion]:
    """Yield this rank's portion of each update in an epoch, from a cursor on.

    Cost: only the order at this rank's positions is computed, so the cost of an update does not
    depend on the number of ranks. An order that sorts must compute more positions.
    """
    num_samples, end, key = epoch.num_samples, epoch.cut.end(start.samples), epoch.key
    following = Cursor(epoch.number + 1)
    most = _MOST_SORTED if epoch.sorts else num_samples
    for updates in _blocks(epoch.cut.spans(start.samples), plan.num_shares, most):
        parts = [tuple(plan.parts(update)) for update in updates]
        places = _places(updates, parts)
        if updates[-1][1] > num_samples:  # padded with samples of the epoch's start
            places %= num_samples
        block, first = epoch.order(places), 0
        for (low, high), spans in zip(updates, parts, strict=True):
            indices: list[Indices] = []
            for begin, stop in spans:
                last = first + (stop - begin or 1)
                indices.append(block[first:last])
                first = last
            after = Cursor.reached(epoch.number, high) if high < end else following
            yield Portion(
                start, after, high - low, spans, tuple(indices), num_samples, key
            )
            start = after


def _blocks(spans: Iterable[Span], num_shares: int, most: int) -> Iterator[list[Span]]:
    """Yield blocks of updates for which the order is computed at once.

    The first block is small, for a quick start. A block ends when it has `most` positions.
    """
    block: list[Span] = []
    size = _FIRST_BLOCK
    for low, high in spans:
        block.append((low, high))
        positions = high - block[0][0]
        if positions >= min(size * num_shares, most) or len(block) == _UPDATES:
            yield block
            block, size = [], min(16 * size, _BLOCK)
    if block:
        yield block


def _places(updates: list[Span], parts: list[tuple[Span, ...]]) -> Indices:
    """Return the positions to read; an empty micro-batch reads a position next to it as filler."""
    runs = [
        (begin if begin < high else high - 1, stop - begin or 1)
        for (_, high), spans in zip(updates, parts, strict=True)
        for begin, stop in spans
    ]
    firsts, counts = np.array(runs, np.int64).T
    ends = np.cumsum(counts)
    return np.arange(ends[-1]) + np.repeat(firsts - ends + counts, counts)
