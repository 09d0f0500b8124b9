# SPDX-License-Identifier: Apache-2.0
"""Orders: map positions of an epoch to dataset indices."""

import operator
from collections.abc import Callable, Iterable, Sequence, Sized
from functools import partial
from itertools import islice
from typing import Any, Protocol, TypeAlias, cast

import attrs
import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from accelfn.base import draws
from accelfn.base.arguments import check_integer, truth
from accelfn.errors import ArgumentError, DataError


def promised_length(value: Any) -> int | None:
    """Return the length that a dataset, stream or sampler says it has, if it says one.

    Raises:
        DataError: what it says is no length, such as one below 0.
    """
    try:
        return len(value)
    except (TypeError, NotImplementedError):
        return None
    except (ValueError, OverflowError) as error:
        msg = (
            f"{type(value).__name__} has a __len__ that gives no length: {error}."
            " Expected a number of samples, 0 or more."
        )
        raise DataError(msg) from error


# A keyed permutation of the integers below n, and keyed draws: functions of a position.
#
# Nothing here is as long as the dataset, so an epoch over 10**12 samples starts, and
# resumes, at once.


Indices: TypeAlias = npt.NDArray[np.int64]
Numbers: TypeAlias = npt.NDArray[np.uint64]

_ROUNDS = 6
_MULTIPLIERS = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9))
_LEAST = 3
"""Bits of half a number, at least: fewer are permuted in too few ways."""


def shuffle_positions(positions: Indices, *, n: int, key: int) -> Indices:
    """Apply a keyed permutation of 0..n-1 to positions.

    A Feistel network permutes the next power of four at or above n (at least 64), and
    results of n or more are sent through it again until they fall below n, which keeps it
    a permutation (cycle walking; Black and Rogaway 2002, "Ciphers with Arbitrary Finite
    Domains"). Each index costs some 30 ns and depends on no other.
    """
    half = np.uint64(max(_LEAST, ((n - 1).bit_length() + 1) // 2))
    keys = [np.uint64(draws.fold(key, i)) for i in range(_ROUNDS)]
    permute: Callable[[Numbers], Numbers] = partial(_feistel, half=half, keys=keys)
    if half == _LEAST:  # few numbers walk far, and look up where
        permute = permute(np.arange(1 << 2 * _LEAST, dtype=np.uint64)).__getitem__
    result = permute(positions.astype(np.uint64))
    outside = np.flatnonzero(result >= n)
    while outside.size:
        walked = permute(result[outside])
        result[outside] = walked
        outside = outside[walked >= n]
    return result.astype(np.int64)


def _feistel(values: Numbers, half: np.uint64, keys: Sequence[np.uint64]) -> Numbers:
    """Permute the integers of `2 * half` bits."""
    mask = (np.uint64(1) << half) - np.uint64(1)
    high = np.uint64(32)
    left, right = values >> half, values & mask
    for key in keys:
        mixed = (right ^ key) * _MULTIPLIERS[0]
        mixed ^= mixed >> high
        mixed *= _MULTIPLIERS[1]
        left, right = right, left ^ ((mixed >> high) & mask)
    return (left << half) | right


def uniform(positions: Indices, *, key: int) -> npt.NDArray[np.float64]:
    """Return a number in [0, 1) for each position, from (key, position) alone.

    The finaliser of splitmix64, as in `streams.fold`, of which the upper 53 bits are taken.
    """
    z = (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z += np.uint64(key)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return (z >> np.uint64(11)).astype(np.float64) * 2.0**-53


# `Order`, and the plain ones: the dataset's own, shuffled, and a user's function.
#
# An order gives, for an epoch, a function from positions to dataset indices. It is pure: it
# depends on the seed and the epoch alone, so every rank computes the same one, and a
# resumed run computes what the uninterrupted one did.


AtPositions: TypeAlias = Callable[[Indices], Indices]
"""One epoch's order: positions to dataset indices."""
OrderFunction: TypeAlias = Callable[[int, int, int], Sequence[int]]
"""A user's own order: `(seed, epoch, n) -> indices`, which may be lazy."""
_LOOKED = 1000
"""Positions at which two orders are compared: those that are drawn differ at most of them."""


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
        key = draws.key(seed, "order", epoch)
        return lambda positions: shuffle_positions(positions, n=n, key=key)


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
        """Call the function, twice: a run that goes on calls it again.

        Raises:
            DataError: it gives no n indices, or others when it is asked again.
        """
        where = f"order(seed={seed}, epoch={epoch}, n={n})"
        indices, again = (self._called(n, seed, epoch) for _ in range(2))
        if not hasattr(indices, "__len__") or not hasattr(indices, "__getitem__"):
            kind = type(indices).__name__
            msg = f"{where} gave a {kind}; expected {n} indices, as a sequence."
            raise DataError(msg)
        if len(indices) != n:
            msg = f"{where} gave {len(indices)} indices; expected {n}."
            raise DataError(msg)
        looked = np.linspace(0, n - 1, min(n, _LOOKED), dtype=np.int64).tolist()
        # one that is lazy, and is given again, is asked for nothing that is not read
        is_same = indices is again
        if not is_same and any(indices[at] != again[at] for at in looked):
            msg = (
                f"{where} gave two different orders when it was called twice, so a run could"
                " not be resumed. Let it draw from numpy's, torch's or Python's default"
                " generators, which are set from the seed and the epoch, or from a generator"
                " that it makes of both, as np.random.default_rng([seed, epoch])."
            )
            raise DataError(msg)

        def order(positions: Indices) -> Indices:
            found = np.array([indices[int(p)] for p in positions])
            return check_indices(found, n=n, where=where)

        return order

    def _called(self, n: int, seed: int, epoch: int) -> Any:
        with draws.seeded() as seeds:
            seeds.begin(draws.key(seed, "own order", epoch))
            return self.function(seed, epoch, n)


def check_indices(found: npt.NDArray[Any], *, n: int, where: str) -> Indices:
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


def _themselves(positions: Indices) -> Indices:
    return positions


def looked_up(indices: Indices) -> AtPositions:
    """Return the order that an array says."""
    return lambda positions: indices[positions]


# One number a sample, as users give them: weights, lengths, costs.


def as_counts(values: Any, where: str) -> Indices:
    """Return one integer a sample.

    Raises:
        ArgumentError: something else was given.
    """
    counts = as_array(values)
    if counts.ndim != 1 or counts.dtype.kind not in "iu" or (counts < 0).any():
        msg = f"{where}: got {describe_values(counts)}; expected one integer a sample, 0 or more."
        raise ArgumentError(msg)
    return counts.astype(np.int64)


def as_array(values: Any) -> npt.NDArray[Any]:
    """Return values as an array, of objects if nothing else can hold them."""
    try:
        return np.asarray(values)
    except ValueError:  # lists of different lengths
        return np.array([*values, None], dtype=object)[:-1]


def describe_values(found: npt.NDArray[Any]) -> str:
    """Describe invalid values for an error message."""
    first = (
        ", ".join(map(repr, found[:3].tolist())) if found.ndim else repr(found.item())
    )
    more = ", ..." if found.ndim and len(found) > 3 else ""
    return f"[{first}{more}]" if found.ndim else first


def check_one_each(order: str, what: str, values: Sized, n: int) -> None:
    """Raise if there is not one for each sample."""
    if len(values) != n:
        msg = f"af.orders.{order}: {len(values)} {what} for a dataset of {n} samples."
        raise DataError(msg)


# `bucketed`: samples of similar lengths in a batch, so that little is padding.


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

    Cost: 8 bytes a sample, and a sort of one window at a time, which is no smaller than an
    update's batch: each rank sorts all of it, on however many it is shared out.

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
    sorts: bool = attrs.field(default=True, init=False)

    def __attrs_post_init__(self) -> None:
        """Check the window."""
        check_integer(
            "af.orders.bucketed", "window", self.window, 1, "a number of samples"
        )

    def num_samples(self, n: int) -> int:
        """Take each sample once.

        Raises:
            DataError: the dataset has not as many samples as there are lengths.
        """
        check_one_each("bucketed", "lengths", self.lengths, n)
        return n

    def of_epoch(
        self, n: int, *, seed: int, epoch: int, batch_size: int | None
    ) -> AtPositions:
        """Return an epoch's order, computed a window at a time."""
        key = draws.key(seed, "order", epoch)
        step = batch_size or 1
        window = -(-self.window // step) * step

        def sorted_window(number: int) -> Indices:
            places = np.arange(number * window, min((number + 1) * window, n))
            indices = shuffle_positions(places, n=n, key=key)
            indices = indices[np.argsort(self.lengths[indices], kind="stable")]
            if batch_size is None:
                return indices
            whole = len(indices) // step  # a short last batch stays the last
            turns = shuffle_positions(
                np.arange(whole), n=max(whole, 1), key=draws.fold(key, number)
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


# A torch sampler as an order: drawn once an epoch, on every rank alike.


@attrs.frozen(eq=False)
class Sampled:
    """A torch sampler, drawn once an epoch on every rank alike: whole, for it cannot be asked."""

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
        return looked_up(check_indices(np.array(drawn), n=n, where=self.name))


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
    kind, length = type(sampler).__name__, _length_of(sampler)
    first, again = (_draw_indices(sampler, seed, epoch, length + 1) for _ in range(2))
    if len(first) != length:
        found = "more" if len(first) > length else len(first)
        msg = f"{kind} says that it has {length}, and gave {found} in epoch {epoch}."
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


def _draw_indices(sampler: Any, seed: int, epoch: int, most: int) -> list[Any]:
    """Return at most `most` indices of a sampler, which may be infinite."""
    key = draws.key(seed, "sampler", epoch)
    for owner in (sampler, getattr(sampler, "sampler", None)):
        if callable(getattr(owner, "set_epoch", None)):
            cast("Any", owner).set_epoch(epoch)
    seed_generators(sampler, key)
    with draws.seeded() as seeds:
        seeds.begin(key)
        return [_plain(each) for each in islice(sampler, most)]


def seed_generators(owner: Any, key: int) -> None:
    """Seed the `generator` of a sampler or loader, and that of its own sampler."""
    for holder in (owner, getattr(owner, "sampler", None)):
        generator = getattr(holder, "generator", None)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(key)


def _plain(index: Any) -> Any:
    """Return an index, or a list of them, as plain integers; anything else as it is."""
    if isinstance(index, (torch.Tensor, np.ndarray)):
        return cast("Any", index).tolist()
    if isinstance(index, (list, tuple)):
        return [_plain(each) for each in cast("list[Any]", index)]
    return operator.index(index) if hasattr(index, "__index__") else index


def _length_of(sampler: Any) -> int:
    length = promised_length(sampler)
    if length is None:
        msg = f"{type(sampler).__name__} has no length; a sampler needs __len__."
        raise DataError(msg)
    return length


# `weighted`: samples drawn in proportion to weights.


Floats: TypeAlias = npt.NDArray[np.float64]


def _as_weights(values: Any) -> Floats:
    weights = as_array(values)
    numbers = weights.ndim == 1 and weights.dtype.kind in "biuf"
    fits = numbers and np.isfinite(weights).all() and (weights >= 0).all()
    if not fits or not weights.any():
        msg = (
            f"af.orders.weighted(weights): got {describe_values(weights)}; expected one finite"
            " number of 0 or more for each sample, not all 0."
        )
        raise ArgumentError(msg)
    weights = weights.astype(np.float64)
    with np.errstate(over="ignore"):
        has_sum = np.isfinite(weights.sum())
    return weights if has_sum else weights / weights.max() / len(weights)


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
    replacement: bool = attrs.field(
        default=True, validator=truth(within="af.orders."), kw_only=True
    )
    name: str = attrs.field(default="weighted", init=False)

    def __attrs_post_init__(self) -> None:
        """Refuse to draw more than there are."""
        possible = int(np.count_nonzero(self.weights))
        if self.drawn is None:
            return
        check_integer("af.orders.weighted", "num_samples", self.drawn, 1)
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
        check_one_each("weighted", "weights", self.weights, n)
        if self.drawn is not None:
            return self.drawn
        return n if self.replacement else int(np.count_nonzero(self.weights))

    def of_epoch(self, n: int, *, seed: int, epoch: int, **_: Any) -> AtPositions:
        """Return an epoch's draws."""
        key = draws.key(seed, "order", epoch)
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
