# SPDX-License-Identifier: Apache-2.0
"""`weighted`: samples drawn in proportion to weights."""

from typing import Any, TypeAlias

import attrs
import numpy as np
import numpy.typing as npt

from accelfn.base import draws
from accelfn.base.arguments import check_integer, truth
from accelfn.base.calling import called
from accelfn.data.orders.numbers import (
    as_array,
    check_one_each,
    seen,
)
from accelfn.data.orders.order import AtPositions, looked_up
from accelfn.data.permutation import Indices, uniform
from accelfn.errors import ArgumentError

Floats: TypeAlias = npt.NDArray[np.float64]


def _as_weights(values: Any) -> Floats:
    weights = as_array(values)
    numbers = weights.ndim == 1 and weights.dtype.kind in "biuf"
    fits = numbers and np.isfinite(weights).all() and (weights >= 0).all()
    if not fits or not weights.any():
        msg = (
            f"af.orders.weighted(weights): got {seen(weights)}; expected one finite number"
            " of 0 or more for each sample, not all 0."
        )
        raise ArgumentError(msg)
    weights = weights.astype(np.float64)
    with np.errstate(over="ignore"):
        has_sum = np.isfinite(weights.sum())
    return weights if has_sum else weights / weights.max() / len(weights)


@called
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
