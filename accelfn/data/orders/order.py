# SPDX-License-Identifier: Apache-2.0
"""`Order`, and the plain ones: the dataset's own, shuffled, and a user's function.

An order gives, for an epoch, a function from positions to dataset indices. It is pure: it
depends on the seed and the epoch alone, so every rank computes the same one, and a resumed
run computes what the uninterrupted one did.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import attrs
import numpy as np
import numpy.typing as npt

from accelfn.base import draws
from accelfn.data.permutation import Indices, shuffled
from accelfn.errors import DataError

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
            return checked(found, n=n, where=where)

        return order

    def _called(self, n: int, seed: int, epoch: int) -> Any:
        with draws.seeded() as seeds:
            seeds.begin(draws.key(seed, "own order", epoch))
            return self.function(seed, epoch, n)


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


def _themselves(positions: Indices) -> Indices:
    return positions


def looked_up(indices: Indices) -> AtPositions:
    """Return the order that an array says."""
    return lambda positions: indices[positions]
