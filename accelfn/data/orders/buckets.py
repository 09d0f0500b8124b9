# SPDX-License-Identifier: Apache-2.0
"""`bucketed`: samples of similar lengths in a batch, so that little is padding."""

from typing import Any

import attrs
import numpy as np

from accelfn.base import draws
from accelfn.base.arguments import check_integer
from accelfn.base.calling import called
from accelfn.data.orders.numbers import as_counts, check_one_each
from accelfn.data.orders.order import AtPositions
from accelfn.data.permutation import Indices, shuffled


def _as_lengths(values: Any) -> Indices:
    return as_counts(values, "af.orders.bucketed(lengths)")


@called
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
            indices = shuffled(places, n=n, key=key)
            indices = indices[np.argsort(self.lengths[indices], kind="stable")]
            if batch_size is None:
                return indices
            whole = len(indices) // step  # a short last batch stays the last
            turns = shuffled(
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
