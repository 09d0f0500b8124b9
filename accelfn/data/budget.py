# SPDX-License-Identifier: Apache-2.0
"""Batches of as many samples as fit a budget, such as a number of tokens."""

from typing import Any

import attrs
import numpy as np

from accelfn.base.arguments import integer, truth
from accelfn.base.calling import called
from accelfn.data.cut import UnevenCut
from accelfn.data.orders.numbers import as_counts
from accelfn.data.permutation import Indices
from accelfn.errors import DataError


def _as_costs(values: Any) -> Indices:
    return as_counts(values, "af.budget(costs)")


@called
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
