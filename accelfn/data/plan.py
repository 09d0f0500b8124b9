# SPDX-License-Identifier: Apache-2.0
"""Plans and epochs: which samples of an update each rank takes, in which order."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeAlias, cast

import attrs
import numpy as np
import numpy.typing as npt
import torch

from accelfn.base import draws, tree
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
from accelfn.data.sources import Source
from accelfn.errors import ArgumentError, BatchError, CallError, DataError

if TYPE_CHECKING:
    from accelfn.data.dataset import Data
    from accelfn.world import World

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
                f"af.typing.Plan(rank={self.rank}, num_shares={self.num_shares}): the shares are 0"
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
        start: the cursor before the batch; None for a batch of `af.join_uneven`.
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

    def note_stand_ins(self, world: "World") -> "Batch":
        """Let steps of this rank reject the value of an empty share without its batch."""
        for value, weight in zip(self.micro_batches, self.weights, strict=True):
            if weight == 0:
                world.connection.activity.stand_ins.append(value)
        return self

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


@attrs.frozen(eq=False, repr=False)
class token_budget:
    """Let an update take as many samples, in their order, as fit a limit.

    Write `af.Data(global_batch_size=af.token_budget(lengths, limit=4096))`. With
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

    costs: Indices = attrs.field(
        converter=partial(as_counts, where="af.token_budget(costs)")
    )
    limit: int = attrs.field(validator=integer(1), kw_only=True)
    padded: bool = attrs.field(default=True, validator=truth(), kw_only=True)

    def __attrs_post_init__(self) -> None:
        """Check that every sample fits."""
        large = np.flatnonzero(self.costs > self.limit)
        if len(large):
            first = int(large[0])
            msg = (
                f"af.token_budget(limit={self.limit}): sample {first} alone costs"
                f" {self.costs[first]}; too large are {len(large)} of {len(self.costs)}"
                " samples. Leave them out, cut them, or take a larger limit."
            )
            raise DataError(msg)

    def __repr__(self) -> str:
        """Show the limit, not the costs."""
        return f"a budget of {self.limit}"

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


# Epochs and fingerprints: the order of an epoch's samples, and a hash to compare data.


_PROBES = 8
"""How many samples are read: the first, the last, and some between."""


def form_of(data: "Data") -> dict[str, Any]:
    """Describe batching and order as plain data, without reading samples."""
    size = data.global_batch_size
    form: dict[str, Any] = {
        "batch_size": size if isinstance(size, int) else repr(size or "sampler"),
        "remainder": data.remainder,
    }
    if data.is_stream:
        return form
    sampler = data.batch_sampler
    order = data.ordering.name if sampler is None else type(sampler).__name__
    return form | {"samples": len(data), "order": order}


def fingerprint_of(source: Source) -> str:
    """Return a hash of a few samples; leave out samples that differ when read twice.

    Cost: eight samples are read twice, once for each `Data` that is saved.

    Raises:
        DataError: a sample cannot be read; without it, the hash would be another.
    """
    digest = hashlib.sha256()
    for place in places_of(source):
        try:
            first, again = (_hash_of(sample_at(source, place)) for _ in range(2))
        except Exception as error:
            msg = (
                f"sample {place} of the dataset cannot be read, and a resumed run checks its"
                f" data by a hash of some samples: {type(error).__name__}: {error}. Try again"
                ' if it can be read now, or write af.Data(fingerprint="a name of the data").'
            )
            raise DataError(msg) from error
        if first == again:
            digest.update(first)
    return digest.hexdigest()[:16]


def places_of(source: Source) -> list[int]:
    """Return the indices of the samples to hash."""
    n = len(source)
    return np.unique(np.linspace(0, n - 1, min(_PROBES, n)).astype(np.int64)).tolist()


def sample_at(source: Source, place: int) -> Any:
    """Return a sample; random numbers from default generators are the same each time."""
    with draws.seeded() as drawing:

        def begin(_place: int) -> None:
            drawing.begin(0)

        begin(0)
        return source.samples(np.array([place]), begin)[0]


def _hash_of(sample: Any) -> bytes:
    digest = hashlib.sha256()
    for leaf in tree.tree_leaves(sample):
        digest.update(bytes_of(leaf))
    return digest.digest()


def bytes_of(leaf: Any) -> bytes:
    """Return bytes that identify a leaf; for an unknown object, those of its class."""
    if isinstance(leaf, torch.Tensor):
        with suppress(RuntimeError):  # a sparse tensor has no such bytes
            # a contiguous copy without a pending conjugation
            array = leaf.detach().cpu().clone(memory_format=torch.contiguous_format)
            head = f"{array.dtype}{tuple(array.shape)}".encode()
            return head + array.reshape(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(leaf, (np.ndarray, np.void)) and leaf.dtype.hasobject:
        return _bytes_of_objects(np.asarray(leaf))
    if isinstance(leaf, np.ndarray):
        return f"{leaf.dtype}{leaf.shape}".encode() + leaf.tobytes()
    if isinstance(leaf, (str, int, float, bool, bytes, type(None), np.generic)):
        return f"{leaf!r};".encode()
    return f"<{type(leaf).__qualname__}>".encode()


def _bytes_of_objects(array: np.ndarray[Any, Any]) -> bytes:
    """Return bytes that identify an array of objects; its own bytes are addresses."""
    names = array.dtype.names
    parts = [array[n] for n in names] if names else array.ravel().tolist()
    result = f"{array.dtype}{array.shape}".encode()
    for part in parts:
        leaves = (_digest(bytes_of(leaf)) for leaf in tree.tree_leaves(part))
        result += _digest(b"".join(leaves))
    return result


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


# An epoch as a value: the dataset index of each position, and the ends of batches.


_FIRST_BLOCK, _BLOCK, _UPDATES = 1_024, 65_536, 2_048
"""This rank's positions of the first block and later blocks, and updates of a block."""
_MOST_SORTED = 1 << 22
"""Most positions of all ranks in a block of an order that sorts, because it sorts them all."""


@attrs.frozen(eq=False)
class Epoch:
    """One pass over the data.

    Attributes:
        number: the epoch's number, from 0.
        num_samples: number of positions.
        order: maps positions to dataset indices.
        cut: the ends of batches.
        key: the key of random numbers.
        sorts: whether the order also computes positions that were not requested.
    """

    number: int
    num_samples: int
    order: AtPositions
    cut: Cut
    key: int
    sorts: bool = False

    def shuffled_batches(self, key: int) -> "Epoch":
        """Return the epoch with its batches in a random order, the last one last."""
        stops = np.fromiter((stop for _, stop in self.cut.spans(0)), np.int64)
        starts = np.concatenate([[0], stops[:-1]])
        indices = self.order(np.arange(self.num_samples))
        count = len(stops) - 1
        turns = np.arange(len(stops))
        if count > 0:
            turns[:count] = shuffle_positions(turns[:count], n=count, key=key)
        sizes = (stops - starts)[turns]
        ends = np.cumsum(sizes)
        places = np.arange(self.num_samples)
        batch = np.searchsorted(ends, places, side="right")
        sources = starts[turns][batch] + places - (ends - sizes)[batch]
        order = order_of_array(indices[sources])
        return attrs.evolve(self, order=order, cut=UnevenCut(ends))


def epoch_of(data: "Data", *, seed: int, number: int) -> Epoch:
    """Return one pass over the data, for a state's seed."""
    key, n = draws.key(seed, "data", number), len(data.source)
    if data.batch_sampler is not None:
        return _sampler_epoch(data.batch_sampler, n, seed=seed, number=number, key=key)
    size = data.global_batch_size if isinstance(data.global_batch_size, int) else None
    order = data.ordering.of_epoch(n, seed=seed, epoch=number, batch_size=size)
    num_samples = len(data)
    if size is not None:
        epoch_cut = EvenCut(num_samples, size, data.remainder)
        sorts = getattr(data.ordering, "sorts", False)
        return Epoch(number, num_samples, order, epoch_cut, key, sorts=sorts)
    epoch_cut = cast("token_budget", data.global_batch_size).cut(
        order(np.arange(num_samples))
    )
    epoch = Epoch(number, num_samples, order, epoch_cut, key)
    if getattr(data.ordering, "shuffles_batches", False):
        return epoch.shuffled_batches(draws.key(seed, "batches", number))
    return epoch


def _sampler_epoch(sampler: Any, n: int, *, seed: int, number: int, key: int) -> Epoch:
    """Return the epoch of a batch sampler over n samples.

    Raises:
        DataError: it does not give lists of indices, or gives an empty list.
    """
    name = f"batch_sampler ({type(sampler).__name__})"
    batches = read_sampler(sampler, seed=seed, epoch=number)
    wrong = [batch for batch in batches if not isinstance(batch, list)]
    if wrong:
        msg = f"{name} gave {wrong[0]!r} for an update; expected a list of indices."
        raise DataError(msg)
    empty = [i for i, batch in enumerate(batches) if not batch]
    if empty or not batches:
        msg = f"{name} gave no samples for update {empty[0] if empty else 0}."
        raise DataError(msg)
    flat = check_indices(
        np.concatenate([np.asarray(batch) for batch in batches]), n=n, where=name
    )
    stops = np.cumsum([len(batch) for batch in batches])
    return Epoch(number, len(flat), lambda at: flat[at], UnevenCut(stops), key)


class Portion(NamedTuple):
    """A rank's part of one update, before it is read.

    A named tuple takes half the time of a frozen record, and each update makes a portion.

    Attributes:
        start: the cursor before the update.
        after: the cursor after the update.
        num_samples: samples of the update, on all ranks.
        spans: positions of the rank's micro-batches.
        indices: dataset indices to read for each; an empty micro-batch reads a stand-in.
        own: how many of the epoch's positions are samples; later positions are repeats.
        key: the key of random numbers.
        shares: how many samples each rank has, if ranks have exchanged the numbers.
    """

    start: Cursor
    after: Cursor
    num_samples: int
    spans: tuple[Span, ...]
    indices: tuple[Indices, ...]
    own: int
    key: int
    shares: list[tuple[int, ...]] | None = None


def portions(epoch: Epoch, plan: Plan, start: Cursor) -> Iterator[Portion]:
    """Yield this rank's part of an epoch's updates from a cursor on.

    Cost: the order computes only the positions of this rank, so an update costs the same on any
    number of ranks. An order that sorts computes more positions.
    """
    num_samples, end, key = epoch.num_samples, epoch.cut.end(start.samples), epoch.key
    following = Cursor(epoch.number + 1)
    most = _MOST_SORTED if epoch.sorts else num_samples
    for updates in _blocks(epoch.cut.spans(start.samples), plan.num_shares, most):
        parts = [tuple(plan.parts(update)) for update in updates]
        places = _places(updates, parts)
        if updates[-1][1] > num_samples:  # padded: filled from the start of the order
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
    """Yield blocks of updates to order at once: the first is small, for a quick start.

    A block ends at its largest number of positions of all ranks.
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
    """Return the positions to read; an empty part reads the position next to it."""
    runs = [
        (begin if begin < high else high - 1, stop - begin or 1)
        for (_, high), spans in zip(updates, parts, strict=True)
        for begin, stop in spans
    ]
    firsts, counts = np.array(runs, np.int64).T
    ends = np.cumsum(counts)
    return np.arange(ends[-1]) + np.repeat(firsts - ends + counts, counts)
