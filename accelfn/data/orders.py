# SPDX-License-Identifier: Apache-2.0
"""Orders: in which order an epoch takes the samples of a dataset, as a function.

An order gives, for an epoch, a function from positions to dataset indices. It is pure: it
depends on the seed and the epoch alone, so every rank computes the same one, and a resumed
run computes what the uninterrupted one did.
"""

import operator
from collections.abc import Callable, Iterable, Sequence, Sized
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, Protocol, TypeAlias, cast

import attrs
import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from accelfn import streams
from accelfn.data.permutation import Indices, shuffled, uniform
from accelfn.errors import ArgumentError, DataError

AtPositions: TypeAlias = Callable[[Indices], Indices]
"""One epoch's order: positions to dataset indices."""
OrderFunction: TypeAlias = Callable[[int, int, int], Sequence[int]]
"""A user's own order: `(seed, epoch, n) -> indices`, which may be lazy."""
Floats: TypeAlias = npt.NDArray[np.float64]


class Order(Protocol):
    """In which order the samples of a dataset come."""

    @property
    def name(self) -> str:
        """What it is called in a repr and in a checkpoint."""
        ...

    def num_samples(self, n: int) -> int:
        """Return how many positions an epoch over n samples has."""
        ...

    def of_epoch(
        self, n: int, *, seed: int, epoch: int, batch_size: int | None
    ) -> AtPositions:
        """Return one epoch's order; `batch_size` is None where batches differ in size."""
        ...


@attrs.frozen
class Sequential:
    """The dataset's own order."""

    name: str = attrs.field(default="in order", init=False)

    def num_samples(self, n: int) -> int:
        """Take each sample once."""
        return n

    def of_epoch(self, n: int, **_: Any) -> AtPositions:
        """Return the positions themselves."""
        return _themselves


@attrs.frozen
class Shuffled:
    """A permutation of its own for each epoch, with random access."""

    name: str = attrs.field(default="shuffled", init=False)

    def num_samples(self, n: int) -> int:
        """Take each sample once."""
        return n

    def of_epoch(self, n: int, *, seed: int, epoch: int, **_: Any) -> AtPositions:
        """Return the permutation; an index costs some 30 ns, wherever it is."""
        key = streams.key(seed, "order", epoch)
        return lambda positions: shuffled(positions, n=n, key=key)


@attrs.frozen
class Own:
    """A user's function, its indices checked as they are read."""

    function: OrderFunction

    @property
    def name(self) -> str:
        """Its own."""
        return f"own order {getattr(self.function, '__qualname__', '')}".strip()

    def num_samples(self, n: int) -> int:
        """Take n samples."""
        return n

    def of_epoch(self, n: int, *, seed: int, epoch: int, **_: Any) -> AtPositions:
        """Call the function."""
        indices = self.function(seed, epoch, n)
        where = f"order(seed={seed}, epoch={epoch}, n={n})"
        if not hasattr(indices, "__len__") or not hasattr(indices, "__getitem__"):
            kind = type(indices).__name__
            msg = f"{where} gave a {kind}; expected {n} indices, as a sequence."
            raise DataError(msg)
        if len(indices) != n:
            msg = f"{where} gave {len(indices)} indices; expected {n}."
            raise DataError(msg)

        def order(positions: Indices) -> Indices:
            found = np.array([indices[int(p)] for p in positions])
            return checked(found, n=n, where=where)

        return order


def _as_weights(values: Any) -> Floats:
    weights = _array(values)
    numbers = weights.ndim == 1 and weights.dtype.kind in "biuf"
    fits = numbers and np.isfinite(weights).all() and (weights >= 0).all()
    if not fits or not weights.any():
        msg = (
            f"af.orders.weighted(weights): got {_seen(weights)}; expected one finite number"
            " of 0 or more for each sample, not all 0."
        )
        raise ArgumentError(msg)
    return weights.astype(np.float64)


def _array(values: Any) -> npt.NDArray[Any]:
    """Return values as an array, of objects if nothing else can hold them."""
    try:
        return np.asarray(values)
    except ValueError:  # lists of different lengths
        return np.array([*values, None], dtype=object)[:-1]


def _seen(found: npt.NDArray[Any]) -> str:
    """Return how values look that are not what they should be."""
    first = (
        ", ".join(map(repr, found[:3].tolist())) if found.ndim else repr(found.item())
    )
    more = ", ..." if found.ndim and len(found) > 3 else ""
    return f"[{first}{more}]" if found.ndim else first


def as_counts(values: Any, where: str) -> Indices:
    """Return one integer a sample.

    Raises:
        ArgumentError: something else was given.
    """
    counts = _array(values)
    if counts.ndim != 1 or counts.dtype.kind not in "iu" or (counts < 0).any():
        msg = f"{where}: got {_seen(counts)}; expected one integer a sample, 0 or more."
        raise ArgumentError(msg)
    return counts.astype(np.int64)


def _is_flag(owner: object, field: Any, value: object) -> None:
    if not isinstance(value, bool):
        kind = type(owner).__name__
        msg = f"af.orders.{kind}({field.name}={value!r}): expected True or False."
        raise ArgumentError(msg)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


@attrs.frozen(eq=False, repr=False)
class weighted:
    """Samples in proportion to weights.

    With replacement, each position draws on its own: a sample may come twice in an epoch,
    or not at all. Without, the epoch is what drawing one sample after another would give
    (Efraimidis and Spirakis 2006, "Weighted random sampling with a reservoir").

    Args:
        weights: one a sample, 0 or more; they need not sum to 1.
        num_samples: in an epoch; default as many as there are weights, or without
            replacement as many as can be drawn.
        replacement: whether a sample may come again.

    Law: an epoch is a function of the seed and its number.

    Cost: 8 bytes a sample. With replacement an index costs a binary search; without, an
    epoch begins with a sort of all.

    Example:
        >>> from accelfn import Data, orders
        >>> data = Data(["a", "b"], batch_size=4, order=orders.weighted([1, 0], num_samples=4))
        >>> data.epoch(seed=0).order(np.arange(4))
        array([0, 0, 0, 0])
    """

    weights: Floats = attrs.field(converter=_as_weights)
    drawn: int | None = attrs.field(default=None, kw_only=True, alias="num_samples")
    replacement: bool = attrs.field(default=True, validator=_is_flag, kw_only=True)
    name: str = attrs.field(default="weighted", init=False)

    def __attrs_post_init__(self) -> None:
        """Refuse to draw more than there are."""
        possible = int(np.count_nonzero(self.weights))
        if self.drawn is None:
            return
        if not _is_count(self.drawn):
            msg = f"af.orders.weighted(num_samples={self.drawn!r}): expected 1 or more."
            raise ArgumentError(msg)
        if not self.replacement and self.drawn > possible:
            msg = (
                f"af.orders.weighted(num_samples={self.drawn}, replacement=False): only"
                f" {possible} samples have a weight above 0."
            )
            raise ArgumentError(msg)

    def num_samples(self, n: int) -> int:
        """Return how many positions an epoch has.

        Raises:
            DataError: the dataset has not as many samples as there are weights.
        """
        _check_one_each("weighted", "weights", self.weights, n)
        if self.drawn is not None:
            return self.drawn
        return n if self.replacement else int(np.count_nonzero(self.weights))

    def of_epoch(self, n: int, *, seed: int, epoch: int, **_: Any) -> AtPositions:
        """Return an epoch's draws."""
        key = streams.key(seed, "order", epoch)
        if self.replacement:
            below = np.cumsum(self.weights)
            last = int(np.flatnonzero(self.weights)[-1])

            def draw(positions: Indices) -> Indices:
                at = uniform(positions, key=key) * below[-1]
                return np.minimum(np.searchsorted(below, at, side="right"), last)

            return draw
        with np.errstate(divide="ignore"):  # a weight of 0 is never reached
            arrival = -np.log1p(-uniform(np.arange(n), key=key)) / self.weights
        arrival[self.weights == 0] = np.inf
        return looked_up(np.argsort(arrival, kind="stable"))


def _as_lengths(values: Any) -> Indices:
    return as_counts(values, "af.orders.bucketed(lengths)")


@attrs.frozen(eq=False, repr=False)
class bucketed:
    """Samples of like length together, so that little of a padded batch is padding.

    The shuffled samples are sorted by length within windows, and the batches of a window
    come in a random order.

    Args:
        lengths: of each sample.
        window: how many samples are sorted together; the larger, the less padding, and the
            less random the order.

    Law: an epoch takes each sample once, and is a function of the seed and its number.

    Cost: 8 bytes a sample, and a sort of one window at a time.

    Example:
        >>> from accelfn import Data, orders
        >>> data = Data(range(6), batch_size=2, order=orders.bucketed([1, 9, 1, 9, 5, 5]))
        >>> sorted(map(sorted, data.epoch(seed=0).order(np.arange(6)).reshape(3, 2).tolist()))
        [[0, 2], [1, 3], [4, 5]]
    """

    lengths: Indices = attrs.field(converter=_as_lengths)
    window: int = attrs.field(default=8192, kw_only=True)
    name: str = attrs.field(default="bucketed", init=False)
    shuffles_batches: bool = attrs.field(default=True, init=False)

    def __attrs_post_init__(self) -> None:
        """Check the window."""
        if not _is_count(self.window):
            msg = f"af.orders.bucketed(window={self.window!r}): expected 1 or more."
            raise ArgumentError(msg)

    def num_samples(self, n: int) -> int:
        """Take each sample once.

        Raises:
            DataError: the dataset has not as many samples as there are lengths.
        """
        _check_one_each("bucketed", "lengths", self.lengths, n)
        return n

    def of_epoch(
        self, n: int, *, seed: int, epoch: int, batch_size: int | None
    ) -> AtPositions:
        """Return an epoch's order, computed a window at a time."""
        key = streams.key(seed, "order", epoch)
        step = batch_size or 1
        window = -(-self.window // step) * step

        def sorted_window(number: int) -> Indices:
            places = np.arange(number * window, min((number + 1) * window, n))
            indices = shuffled(places, n=n, key=key)
            indices = indices[np.argsort(self.lengths[indices], kind="stable")]
            if batch_size is None:
                return indices
            whole = len(indices) // step  # a short last batch stays the last
            turns = shuffled(
                np.arange(whole), n=max(whole, 1), key=streams.fold(key, number)
            )
            batches = indices[: whole * step].reshape(whole, step)[turns]
            return np.concatenate([batches.reshape(-1), indices[whole * step :]])

        def order(positions: Indices) -> Indices:
            result = np.empty_like(positions)
            numbers = positions // window
            for number in np.unique(numbers).tolist():
                here = numbers == number
                result[here] = sorted_window(number)[positions[here] - number * window]
            return result

        return order


@attrs.frozen(eq=False)
class Sampled:
    """A torch sampler, drawn once an epoch on every rank alike."""

    sampler: Any

    def __attrs_post_init__(self) -> None:
        """Refuse one that gives each rank a part of its own."""
        refuse_distributed(self.sampler)

    @property
    def name(self) -> str:
        """The sampler's class."""
        return type(self.sampler).__name__

    def num_samples(self, n: int) -> int:
        """Return the sampler's length."""
        return _length_of(self.sampler)

    def of_epoch(self, n: int, *, seed: int, epoch: int, **_: Any) -> AtPositions:
        """Draw the epoch."""
        drawn = drawn_once(self.sampler, seed=seed, epoch=epoch)
        return looked_up(checked(np.array(drawn), n=n, where=self.name))


@attrs.frozen
class Mixed:
    """Positions shared out among several datasets that lie one after the other.

    Positions are counted through all epochs. At the end of every block each dataset has
    had its exact share, to within one sample; it goes through its samples epoch after epoch
    of its own, so none comes again before all have come.

    Attributes:
        lengths: of the datasets.
        weights: in which proportion each has its share of the positions.
        inner: the order of a dataset's own samples.
    """

    lengths: tuple[int, ...]
    weights: tuple[float, ...]
    inner: Order

    @property
    def name(self) -> str:
        """What is mixed, and in which proportion."""
        weights = ":".join(f"{weight:g}" for weight in self.weights)
        return f"mixed {weights}, {self.inner.name}"

    @cached_property
    def shares(self) -> tuple[int, ...]:
        """The weights as integers of the very same proportion."""
        ratios = [float(weight).as_integer_ratio() for weight in self.weights]
        whole = max(below for _, below in ratios)  # powers of two
        return tuple(above * (whole // below) for above, below in ratios)

    @cached_property
    def block(self) -> int:
        """How many positions are shared out at once; at least four to the least share."""
        return max(64, -(-4 * sum(self.shares) // min(self.shares)))

    def num_samples(self, n: int) -> int:
        """Take as many as there are in all."""
        return n

    def used(self, blocks: int) -> list[int]:
        """Return how many samples of each dataset came in the first blocks."""
        whole, positions = sum(self.shares), self.block * blocks
        sums = accumulate(self.shares, initial=0)
        ends = [(2 * each * positions + whole) // (2 * whole) for each in sums]
        return [stop - start for start, stop in pairwise(ends)]

    def of_epoch(self, n: int, *, seed: int, epoch: int, **_: Any) -> AtPositions:
        """Return an epoch's order, computed a block at a time."""
        offsets = np.cumsum([0, *self.lengths])
        inner: dict[tuple[int, int], AtPositions] = {}

        def own_order(which: int, turn: int) -> AtPositions:
            found = inner.get((which, turn))
            if found is None:
                key = streams.key(seed, "mix", which)
                length = self.lengths[which]
                found = inner[which, turn] = self.inner.of_epoch(
                    length, seed=key, epoch=turn, batch_size=None
                )
            return found

        def of_block(number: int) -> Indices:
            before, after = self.used(number), self.used(number + 1)
            counts = [stop - start for start, stop in zip(before, after, strict=True)]
            key = streams.key(seed, "mix", number)
            turns = shuffled(np.arange(self.block), n=self.block, key=key)
            whose = np.repeat(np.arange(len(counts)), counts)[turns]
            result = np.empty(self.block, np.int64)
            for which, start in enumerate(before):
                places = np.flatnonzero(whose == which)
                turns, within = divmod(
                    start + np.arange(len(places)), self.lengths[which]
                )
                for turn in np.unique(turns).tolist():
                    here = turns == turn
                    found = own_order(which, turn)(within[here])
                    result[places[here]] = found + offsets[which]
            return result

        def order(positions: Indices) -> Indices:
            through = positions + epoch * n
            numbers = through // self.block
            result = np.empty_like(positions)
            for number in np.unique(numbers).tolist():
                here = numbers == number
                result[here] = of_block(number)[through[here] - number * self.block]
            return result

        return order


@attrs.frozen
class Side:
    """Datasets side by side: a column of indices for each, in an order of its own.

    An epoch is as long as the longest; the others begin again, in the order of their next
    epoch.
    """

    names: tuple[str, ...]
    lengths: tuple[int, ...]
    inner: Order

    @property
    def name(self) -> str:
        """What is zipped."""
        return f"zipped {', '.join(self.names)}, {self.inner.name}"

    def num_samples(self, n: int) -> int:
        """Take the longest once."""
        return n

    def of_epoch(self, n: int, *, seed: int, epoch: int, **_: Any) -> AtPositions:
        """Return an epoch's order; its result has a column for each dataset."""

        def column(which: int, through: Indices) -> Indices:
            length = self.lengths[which]
            key = streams.key(seed, "zip", self.names[which])
            turns, places = divmod(through, length)
            found = np.empty_like(places)
            for turn in np.unique(turns).tolist():
                here = turns == turn
                order = self.inner.of_epoch(
                    length, seed=key, epoch=turn, batch_size=None
                )
                found[here] = order(places[here])
            return found

        def order(positions: Indices) -> Indices:
            through = positions + epoch * n
            columns = [column(which, through) for which in range(len(self.lengths))]
            return np.stack(columns, axis=1)

        return order


def order_of_sampler(sampler: Any, n: int) -> Order:
    """Return the order that a torch sampler over n samples stands for.

    One that takes each of them once, in order or shuffled, is not drawn from.
    """
    if is_plain(sampler, SequentialSampler) and len(sampler) == n:
        return Sequential()
    if (
        is_plain(sampler, RandomSampler)
        and not sampler.replacement
        and sampler.num_samples == len(sampler.data_source) == n
    ):
        return Shuffled()
    return Sampled(sampler)


def is_plain(sampler: Any, kind: type) -> bool:
    """Whether it is torch's own of a kind, or torchdata's, which only adds a state."""
    same = ("torchdata.stateful_dataloader.sampler", kind.__name__)
    found = type(sampler)
    return found is kind or (found.__module__, found.__name__) == same


def refuse_distributed(sampler: Any) -> None:
    """Raise if a sampler gives each rank a part already."""
    inner = getattr(sampler, "sampler", None)  # a batch sampler's
    if isinstance(sampler, DistributedSampler) or isinstance(inner, DistributedSampler):
        msg = (
            "A DistributedSampler gives each rank a part already, and af.shard_data() would"
            " cut it again. Give the dataset with shuffle=True, or the sampler that it wraps."
        )
        raise DataError(msg)


def drawn_once(sampler: Iterable[Any], *, seed: int, epoch: int) -> list[Any]:
    """Return what a sampler yields in an epoch, as a function of the seed and the epoch.

    torch's, numpy's and Python's generators are set from both, a `generator` of its own
    too, and `set_epoch` is called where there is one.

    Raises:
        DataError: it yields another number than its length says, or something else when it
            is asked again: then a run could not be resumed.
    """
    first, again = (_drawn(sampler, seed, epoch) for _ in range(2))
    kind, length = type(sampler).__name__, _length_of(sampler)
    if len(first) != length:
        msg = (
            f"{kind} says that it has {length}, and gave {len(first)} in epoch {epoch}."
        )
        raise DataError(msg)
    if first != again:
        msg = (
            f"{kind} gave two different epochs {epoch} when drawn twice, so a run could not"
            " be resumed, and ranks would disagree. Let it draw from torch's, numpy's or"
            " Python's default generators, a torch.Generator named `generator`, or what"
            " set_epoch(epoch) tells."
        )
        raise DataError(msg)
    return first


def _drawn(sampler: Any, seed: int, epoch: int) -> list[Any]:
    key = streams.key(seed, "sampler", epoch)
    for each in (sampler, getattr(sampler, "sampler", None)):
        if callable(getattr(each, "set_epoch", None)):
            cast("Any", each).set_epoch(epoch)
        own = getattr(each, "generator", None)
        if isinstance(own, torch.Generator):
            own.manual_seed(key)
    with streams.drawing() as seeds:
        seeds.begin(key)
        return [_plain(each) for each in sampler]


def _plain(index: Any) -> Any:
    """Return an index, or a list of them, as plain integers; anything else as it is."""
    if isinstance(index, (torch.Tensor, np.ndarray)):
        return cast("Any", index).tolist()
    if isinstance(index, (list, tuple)):
        return [_plain(each) for each in cast("list[Any]", index)]
    return operator.index(index) if hasattr(index, "__index__") else index


def _length_of(sampler: Any) -> int:
    try:
        return len(sampler)
    except (TypeError, NotImplementedError) as error:
        msg = f"{type(sampler).__name__} has no length; a sampler needs __len__."
        raise DataError(msg) from error


def checked(found: npt.NDArray[Any], *, n: int, where: str) -> Indices:
    """Return indices as integers.

    Raises:
        DataError: they are no integers from 0 to n - 1.
    """
    whole = found.dtype.kind in "iu"
    if not whole or (len(found) and (found.min() < 0 or found.max() >= n)):
        wrong = [i for i in found.tolist() if not whole or not 0 <= i < n]
        msg = f"{where} gave the indices {wrong[:5]}; expected integers from 0 to {n - 1}."
        raise DataError(msg)
    return found.astype(np.int64)


def _check_one_each(order: str, what: str, values: Sized, n: int) -> None:
    if len(values) != n:
        msg = f"af.orders.{order}: {len(values)} {what} for a dataset of {n} samples."
        raise DataError(msg)


def _themselves(positions: Indices) -> Indices:
    return positions


def looked_up(indices: Indices) -> AtPositions:
    """Return the order that an array says."""
    return lambda positions: indices[positions]
