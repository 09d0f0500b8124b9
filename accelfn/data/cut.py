# SPDX-License-Identifier: Apache-2.0
"""Where an epoch's positions are cut into updates: arithmetic, before anything is read."""

from collections.abc import Iterator
from typing import Protocol, TypeAlias

import attrs
import numpy as np
import numpy.typing as npt

Span: TypeAlias = tuple[int, int]
"""Positions `start` (included) to `stop` (excluded) of an epoch's order."""

REMAINDERS = ("short", "pad", "drop")


class Cut(Protocol):
    """An epoch's updates, as spans of its positions."""

    def end(self, start: int) -> int:
        """Return where the epoch's own samples end that batches from `start` on have."""
        ...

    def num_batches(self, start: int) -> int:
        """Return how many batches are left from position `start` on."""
        ...

    def spans(self, start: int) -> Iterator[Span]:
        """Yield the batches from position `start` on."""
        ...


@attrs.frozen
class EvenCut:
    """Batches of one size; the last may be another.

    Attributes:
        num_samples: in an epoch.
        batch_size: samples per update, over all ranks and micro-batches.
        remainder: what becomes of a short last batch: "short", "pad" or "drop".
    """

    num_samples: int
    batch_size: int
    remainder: str = "short"

    @property
    def updates_per_epoch(self) -> int:
        """How many batches an epoch has."""
        if self.remainder == "drop":
            return self.num_samples // self.batch_size
        return -(-self.num_samples // self.batch_size)

    def end(self, start: int) -> int:
        """Return where the epoch's own samples end that batches from `start` on have.

        That is the end of all, but with "drop", where those of a short batch are left out.
        """
        if self.remainder != "drop":
            return self.num_samples
        left = max(0, self.num_samples - start)
        return start + left - left % self.batch_size

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
    """Batches that end where an array says, in rising order; the last ends the epoch."""

    stops: npt.NDArray[np.int64]

    def end(self, start: int) -> int:
        """Return where the batches from `start` on end."""
        return int(self.stops[-1]) if len(self.stops) else 0

    def num_batches(self, start: int) -> int:
        """Return how many batches are left from position `start` on."""
        return len(self.stops) - int(np.searchsorted(self.stops, start, side="right"))

    def spans(self, start: int) -> Iterator[Span]:
        """Yield the batches from position `start` on; the first may be the rest of one."""
        first = len(self.stops) - self.num_batches(start)
        for stop in self.stops[first:].tolist():
            yield start, stop
            start = stop


def even_part(span: Span, index: int, count: int) -> Span:
    """Return part `index` of `count`; sizes differ by at most one, larger ones first."""
    start, stop = span
    size, longer = divmod(stop - start, count)
    begin = start + index * size + min(index, longer)
    return begin, begin + size + (index < longer)
