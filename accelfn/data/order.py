# SPDX-License-Identifier: Apache-2.0
"""Orders of samples: the dataset index at each position of an epoch."""

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
    """Return the length of a dataset, stream or sampler; None if it has no length.

    Raises:
        DataError: the length is invalid, such as a negative number.
    """
    try:
        return len(value)
    except (TypeError, NotImplementedError):
        return None
    except (ValueError, OverflowError) as error:
        kind, needs = type(value).__name__, "a number of samples, 0 or more"
        msg = f"{kind} has a __len__ that gives no length: {error}. Expected {needs}."
        raise DataError(msg) from error


# A keyed permutation of the integers below n, and keyed random numbers, computed by position.
#
# No array has the length of the dataset, so an epoch of 10**12 samples starts and resumes at
# once.


Indices: TypeAlias = npt.NDArray[np.int64]
Numbers: TypeAlias = npt.NDArray[np.uint64]

_ROUNDS = 6
_MULTIPLIERS = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9))
_LEAST = 3
"""The least number of bits in each half of a number: fewer bits have too few permutations."""


def shuffle_positions(positions: Indices, *, n: int, key: int) -> Indices:
    """Apply a keyed permutation of 0..n-1 to positions.

    A Feistel network permutes the integers below a power of four that is at least n (and at
    least 64). A result of n or more is permuted again until it is below n. The function is
    then still a permutation (cycle walking; Black and Rogaway 2002, "Ciphers with Arbitrary
    Finite Domains"). Each index takes about 30 ns, and does not depend on other indices.
    """
    half = np.uint64(max(_LEAST, ((n - 1).bit_length() + 1) // 2))
    keys = [np.uint64(draws.fold(key, i)) for i in range(_ROUNDS)]
    permute: Callable[[Numbers], Numbers] = partial(_feistel, half=half, keys=keys)
    if half == _LEAST:  # for few numbers, a table is faster than repeated permutations
        permute = permute(np.arange(1 << 2 * _LEAST, dtype=np.uint64)).__getitem__
    result = permute(positions.astype(np.uint64))
    outside = np.flatnonzero(result >= n)
    while outside.size:
        values = permute(result[outside])
        result[outside] = values
        outside = outside[values >= n]
    return result.astype(np.int64)


def _feistel(values: Numbers, half: np.uint64, keys: Sequence[np.uint64]) -> Numbers:
    """Apply a keyed permutation to integers of `2 * half` bits: several Feistel rounds."""
    mask = (np.uint64(1) << half) - np.uint64(1)
    high = np.uint64(32)
    left, right = values >> half, values & mask
    for key in keys:
        product = (right ^ key) * _MULTIPLIERS[0]
        product ^= product >> high
        product *= _MULTIPLIERS[1]
        left, right = right, left ^ ((product >> high) & mask)
    return (left << half) | right


def uniform(positions: Indices, *, key: int) -> npt.NDArray[np.float64]:
    """Return a number in [0, 1) for each position, which depends only on key and position.

    The number is made of the upper 53 bits of splitmix64's finalizer, as in `draws.fold`.
    """
    z = (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z += np.uint64(key)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return (z >> np.uint64(11)).astype(np.float64) * 2.0**-53


# `Order`, and the simple orders: the dataset's own order, a random order, a user's function.
#
# For each epoch, an order returns a function from positions to dataset indices. The function
# depends only on the seed and the epoch. So all ranks compute the same order, and a resumed run
# computes the order of the uninterrupted run.


AtPositions: TypeAlias = Callable[[Indices], Indices]
"""The order of one epoch: a function from positions to dataset indices."""
OrderFunction: TypeAlias = Callable[[int, int, int], Sequence[int]]
"""A user's function `(seed, epoch, n) -> indices`; it may return a lazy sequence."""
_COMPARED = 1000
"""At how many positions two orders are compared; two random orders differ almost everywhere."""


class Order(Protocol):
    """The order of a dataset's samples."""

    @property
    def name(self) -> str:
        """The name of the order in a repr and in checkpoints."""
        ...

    def num_samples(self, n: int) -> int:
        """Return the number of positions in an epoch of a dataset with n samples."""
        ...

    def of_epoch(
        self, n: int, *, seed: int, epoch: int, batch_size: int | None
    ) -> AtPositions:
        """Return the order of an epoch; `batch_size` is None if batches have different sizes."""
        ...


@attrs.frozen
class Sequential:
    """The order of the dataset itself."""

    name: str = attrs.field(default="in order", init=False)

    def num_samples(self, n: int) -> int:
        """Return n, because an epoch has each sample once."""
        return n

    def of_epoch(self, n: int, **_: Any) -> AtPositions:
        """Return the positions unchanged, because they are the indices."""
        return lambda positions: positions


@attrs.frozen
class Shuffled:
    """A random order, different in each epoch. Any indices can be computed separately."""

    name: str = attrs.field(default="shuffled", init=False)

    def num_samples(self, n: int) -> int:
        """Return n, because an epoch has each sample once."""
        return n

    def of_epoch(self, n: int, *, seed: int, epoch: int, **_: Any) -> AtPositions:
        """Return the permutation of an epoch; each index takes about 30 ns."""
        key = draws.key(seed, "order", epoch)
        return lambda positions: shuffle_positions(positions, n=n, key=key)


@attrs.frozen
class Own:
    """The order of a user's function; accelfn checks its indices when they are used."""

    function: OrderFunction

    @property
    def name(self) -> str:
        """The function's name."""
        return f"own order {getattr(self.function, '__qualname__', '')}".strip()

    def num_samples(self, n: int) -> int:
        """Return n, because the function must return n indices."""
        return n

    def of_epoch(self, n: int, *, seed: int, epoch: int, **_: Any) -> AtPositions:
        """Return the order of an epoch; call the user's function twice and compare the results.

        Raises:
            DataError: the function does not return n indices, or returns different indices at
                the second call, so that a run could not be resumed.
        """
        where = f"order(seed={seed}, epoch={epoch}, n={n})"
        indices, again = (self._call(n, seed, epoch) for _ in range(2))
        if not hasattr(indices, "__len__") or not hasattr(indices, "__getitem__"):
            kind = type(indices).__name__
            msg = f"{where} returned a {kind}; expected a sequence of {n} indices."
            raise DataError(msg)
        if len(indices) != n:
            msg = f"{where} returned {len(indices)} indices; expected {n}, one for each sample."
            raise DataError(msg)
        places = np.linspace(0, n - 1, min(n, _COMPARED), dtype=np.int64).tolist()
        # do not compare a lazy sequence with itself: that would compute its indices
        is_same = indices is again
        if not is_same and any(indices[at] != again[at] for at in places):
            msg = (
                f"{where} returned different orders when it was called twice, so a run could not"
                " be resumed. Use the default random generators of numpy, torch or Python, which"
                " accelfn seeds, or np.random.default_rng([seed, epoch])."
            )
            raise DataError(msg)

        def order(positions: Indices) -> Indices:
            values = np.array([indices[int(p)] for p in positions])
            return check_indices(values, n=n, where=where)

        return order

    def _call(self, n: int, seed: int, epoch: int) -> Any:
        with draws.seeded() as seeds:
            seeds.begin(draws.key(seed, "own order", epoch))
            return self.function(seed, epoch, n)


def check_indices(values: npt.NDArray[Any], *, n: int, where: str) -> Indices:
    """Return indices as an array of integers, after checking them.

    Raises:
        DataError: some indices are not integers from 0 to n - 1.
    """
    are_integers = values.dtype.kind in "iu"
    if not are_integers or (len(values) and (values.min() < 0 or values.max() >= n)):
        wrong = [i for i in values.tolist() if not are_integers or not 0 <= i < n]
        msg = f"{where} returned the indices {wrong[:5]}; expected integers from 0 to {n - 1}."
        raise DataError(msg)
    return values.astype(np.int64)


def order_of_array(indices: Indices) -> AtPositions:
    """Return the order that has these indices at positions 0, 1, 2, ..."""
    return lambda positions: indices[positions]


def look_up_blocks(
    positions: Indices, size: int, order_block: Callable[[int], Indices]
) -> Indices:
    """Return the indices at positions of an order that is computed in blocks.

    Args:
        positions: the positions.
        size: the number of positions in a block.
        order_block: returns the indices in a block, by the block's number.
    """
    result = np.empty_like(positions)
    numbers = positions // size
    for number in np.unique(numbers).tolist():
        mask = numbers == number
        result[mask] = order_block(number)[positions[mask] - number * size]
    return result


# Arrays from users with one number for each sample, such as weights, lengths or costs.


def as_counts(values: Any, where: str) -> Indices:
    """Convert a user's values to an array of integers, one for each sample.

    Raises:
        ArgumentError: the values are not integers of 0 or more.
    """
    counts = as_array(values)
    if counts.ndim != 1 or counts.dtype.kind not in "iu" or (counts < 0).any():
        msg = f"{where}: got {describe_values(counts)}; expected an integer >= 0 for each sample."
        raise ArgumentError(msg)
    return counts.astype(np.int64)


def as_array(values: Any) -> npt.NDArray[Any]:
    """Convert values to an array; lists of different lengths become an array of objects."""
    try:
        return np.asarray(values)
    except ValueError:  # lists of different lengths
        return np.array([*values, None], dtype=object)[:-1]


def describe_values(values: npt.NDArray[Any]) -> str:
    """Return the first of some invalid values as text for an error message."""
    if not values.ndim:
        return repr(values.item())
    first = ", ".join(map(repr, values[:3].tolist()))
    return f"[{first}{', ...' if len(values) > 3 else ''}]"


def check_one_each(call: str, argument: str, values: Sized, n: int) -> None:
    """Raise `DataError` unless there is exactly one value for each of n samples."""
    if len(values) != n:
        msg = f"{call}: got {len(values)} {argument} for {n} samples. Pass one for each sample."
        raise DataError(msg)


# `bucketed`: samples of similar length in the same batch, for little padding.


@attrs.frozen(eq=False, repr=False)
class bucketed:
    """Shuffle, but put samples of similar length into the same batch, for little padding.

    The samples are shuffled and divided into windows. Within a window they are sorted by length
    and cut into batches, and the batches are shuffled.

    Args:
        lengths: the length of each sample.
        window: the number of samples that are sorted together. A larger window needs less
            padding, but the order is less random.

    Law: an epoch has each sample once. Its order depends only on the seed and the epoch.

    Cost: 8 bytes for each sample, and a sort of one window at a time. A window has at least the
    samples of one update, and each rank sorts all of it.

    Example:
        >>> from accelfn import Data, orders
        >>> data = Data(range(6), global_batch_size=2, order=orders.bucketed([1, 9, 1, 9, 5, 5]))
        >>> sorted(map(sorted, data.epoch(seed=0).order(np.arange(6)).reshape(3, 2).tolist()))
        [[0, 2], [1, 3], [4, 5]]
    """

    lengths: Indices = attrs.field(
        converter=partial(as_counts, where="af.orders.bucketed(lengths)")
    )
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
        """Return n, because an epoch has each sample once.

        Raises:
            DataError: the number of lengths is not n.
        """
        check_one_each("af.orders.bucketed", "lengths", self.lengths, n)
        return n

    def of_epoch(
        self, n: int, *, seed: int, epoch: int, batch_size: int | None
    ) -> AtPositions:
        """Return the order of an epoch, which is computed window by window."""
        key = draws.key(seed, "order", epoch)
        step = batch_size or 1
        window = -(-self.window // step) * step

        def sort_window(number: int) -> Indices:
            places = np.arange(number * window, min((number + 1) * window, n))
            indices = shuffle_positions(places, n=n, key=key)
            indices = indices[np.argsort(self.lengths[indices], kind="stable")]
            if batch_size is None:
                return indices
            count = len(indices) // step  # a short last batch stays last
            turns = shuffle_positions(
                np.arange(count), n=max(count, 1), key=draws.fold(key, number)
            )
            batches = indices[: count * step].reshape(count, step)[turns]
            return np.concatenate([batches.reshape(-1), indices[count * step :]])

        return lambda positions: look_up_blocks(positions, window, sort_window)


# A torch sampler as an order: every rank reads the same indices from the sampler.


@attrs.frozen(eq=False)
class Sampled:
    """The order of a torch sampler; every rank reads all its indices in each epoch."""

    sampler: Any

    @property
    def name(self) -> str:
        """The sampler's class."""
        return type(self.sampler).__name__

    def num_samples(self, n: int) -> int:
        """Return the length of the sampler."""
        return _length_of(self.sampler)

    def of_epoch(self, n: int, *, seed: int, epoch: int, **_: Any) -> AtPositions:
        """Read an epoch from the sampler, and return its order."""
        indices = np.array(read_sampler(self.sampler, seed=seed, epoch=epoch))
        return order_of_array(check_indices(indices, n=n, where=self.name))


def order_of_sampler(sampler: Any, n: int) -> Order:
    """Return the order of a torch sampler for a dataset with n samples.

    If the sampler is torch's SequentialSampler or its RandomSampler without replacement,
    accelfn's own order is used instead of the sampler.
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
    """Return whether a sampler's class is torch's, or the one of torchdata with a state."""
    of_torchdata = ("torchdata.stateful_dataloader.sampler", kind.__name__)
    cls = type(sampler)
    return cls is kind or (cls.__module__, cls.__name__) == of_torchdata


def refuse_distributed(sampler: Any) -> None:
    """Raise `DataError` if a sampler already splits the samples among ranks."""
    inner = getattr(sampler, "sampler", None)  # a batch sampler has an inner sampler
    if isinstance(sampler, DistributedSampler) or isinstance(inner, DistributedSampler):
        reason = "A DistributedSampler already splits the samples among ranks"
        advice = "Leave it out and pass shuffle=True, or pass a sampler that yields all samples"
        msg = f"{reason}, and af.shard_data() would split them again. {advice}."
        raise DataError(msg)


def read_sampler(sampler: Iterable[Any], *, seed: int, epoch: int) -> list[Any]:
    """Read a sampler's indices for an epoch, which then depend only on the seed and the epoch.

    For this, accelfn seeds the default generators of torch, numpy and Python and the sampler's
    attribute `generator`, and calls its `set_epoch`, if there is one.

    Raises:
        DataError: the number of indices is not the sampler's length, or the sampler yields
            different indices when it is read twice, so that a run could not be resumed.
    """
    kind, length = type(sampler).__name__, _length_of(sampler)
    first, again = (_draw_indices(sampler, seed, epoch, length + 1) for _ in range(2))
    if len(first) != length:
        count = "more" if len(first) > length else len(first)
        msg = f"{kind} has the length {length}, but yielded {count} indices in epoch {epoch}."
        raise DataError(msg)
    if first != again:
        msg = (
            f"{kind} yielded different indices when epoch {epoch} was read twice, so a run could"
            " not be resumed, and ranks would have different orders. Let it use the default"
            " random generators of torch, numpy or Python, a torch.Generator in its attribute"
            " `generator`, or the argument of set_epoch(epoch)."
        )
        raise DataError(msg)
    return first


def _draw_indices(sampler: Any, seed: int, epoch: int, most: int) -> list[Any]:
    """Read at most `most` indices from a sampler, which may be infinite."""
    key = draws.key(seed, "sampler", epoch)
    for owner in (sampler, getattr(sampler, "sampler", None)):
        if callable(getattr(owner, "set_epoch", None)):
            cast("Any", owner).set_epoch(epoch)
    seed_generators(sampler, key)
    with draws.seeded() as seeds:
        seeds.begin(key)
        return [_plain(index) for index in islice(sampler, most)]


def seed_generators(owner: Any, key: int) -> None:
    """Seed the `generator` of a sampler or loader, and that of its attribute `sampler`."""
    for holder in (owner, getattr(owner, "sampler", None)):
        generator = getattr(holder, "generator", None)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(key)


def _plain(index: Any) -> Any:
    """Convert an index or a list of indices to plain integers; return other values unchanged."""
    if isinstance(index, (torch.Tensor, np.ndarray)):
        return cast("Any", index).tolist()
    if isinstance(index, (list, tuple)):
        return [_plain(item) for item in cast("list[Any]", index)]
    return operator.index(index) if hasattr(index, "__index__") else index


def _length_of(sampler: Any) -> int:
    length = promised_length(sampler)
    if length is None:
        msg = f"{type(sampler).__name__} has no length. Add a method __len__ to the sampler."
        raise DataError(msg)
    return length


# `weighted`: choose samples at random, in proportion to weights.


Floats: TypeAlias = npt.NDArray[np.float64]


def _as_weights(values: Any) -> Floats:
    weights = as_array(values)
    are_numbers = weights.ndim == 1 and weights.dtype.kind in "biuf"
    is_valid = are_numbers and np.isfinite(weights).all() and (weights >= 0).all()
    if not is_valid or not weights.any():
        needs = "one finite number of 0 or more for each sample, not all 0"
        got = describe_values(weights)
        msg = f"af.orders.weighted(weights): got {got}; expected {needs}."
        raise ArgumentError(msg)
    weights = weights.astype(np.float64)
    with np.errstate(over="ignore"):
        has_sum = np.isfinite(weights.sum())
    return weights if has_sum else weights / weights.max() / len(weights)


@attrs.frozen(eq=False, repr=False)
class weighted:
    """Choose samples at random, with probabilities in proportion to weights.

    With replacement, each position of an epoch is chosen independently. So an epoch may have a
    sample several times, or not at all. Without replacement, each position is chosen among the
    remaining samples (Efraimidis and Spirakis 2006, "Weighted random sampling with a
    reservoir").

    Args:
        weights: a number of 0 or more for each sample. The sum need not be 1.
        num_samples: the number of samples in an epoch. The default is the number of weights, or
            without replacement the number of weights above 0.
        replacement: whether an epoch may have a sample several times.

    Law: an epoch's order depends only on the seed and the epoch.

    Cost: 8 bytes for each sample. With replacement, each index needs a binary search. Without
    replacement, each epoch starts with a sort of all samples.

    Example:
        >>> from accelfn import Data, orders
        >>> order = orders.weighted([1, 0], num_samples=4)
        >>> data = Data(["a", "b"], global_batch_size=4, order=order)
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
        """Check that `num_samples` is possible without replacement."""
        possible = int(np.count_nonzero(self.weights))
        if self.drawn is None:
            return
        check_integer("af.orders.weighted", "num_samples", self.drawn, 1)
        if not self.replacement and self.drawn > possible:
            call = f"af.orders.weighted(num_samples={self.drawn}, replacement=False)"
            msg = f"{call}: only {possible} weights are above 0. Pass a smaller num_samples."
            raise ArgumentError(msg)

    def num_samples(self, n: int) -> int:
        """Return the number of positions in an epoch.

        Raises:
            DataError: the number of weights is not n.
        """
        check_one_each("af.orders.weighted", "weights", self.weights, n)
        if self.drawn is not None:
            return self.drawn
        return n if self.replacement else int(np.count_nonzero(self.weights))

    def of_epoch(self, n: int, *, seed: int, epoch: int, **_: Any) -> AtPositions:
        """Return the order of an epoch."""
        key = draws.key(seed, "order", epoch)
        if self.replacement:
            below = np.cumsum(self.weights)
            last = int(np.flatnonzero(self.weights)[-1])

            def draw(positions: Indices) -> Indices:
                at = uniform(positions, key=key) * below[-1]
                return np.minimum(np.searchsorted(below, at, side="right"), last)

            return draw
        with np.errstate(divide="ignore"):  # samples of weight 0 come last
            arrival = -np.log1p(-uniform(np.arange(n), key=key)) / self.weights
        arrival[self.weights == 0] = np.inf
        return order_of_array(np.argsort(arrival, kind="stable"))
