# SPDX-License-Identifier: Apache-2.0
"""Who takes which samples of an update: arithmetic on positions, before anything is read."""

from collections.abc import Iterator
from typing import TypeAlias

import attrs

from accelfn.cursor import Cursor
from accelfn.errors import BatchError

Span: TypeAlias = tuple[int, int]
"""Positions `start` (included) to `stop` (excluded) of an epoch's order."""


@attrs.frozen(kw_only=True)
class Plan:
    """How the global batches of an epoch are cut, and which parts this rank takes.

    A transform's `data` method maps one plan to another. Parts of one batch differ by at
    most one sample and may be empty; together, in rank order, they are the batch.

    Attributes:
        num_samples: in an epoch.
        batch_size: samples per update, over all ranks and micro-batches.
        remainder: what becomes of a short last batch: "short", "pad" or "drop".
        world_rank: of the process.
        world_size: of its world.
        rank: which share this process takes.
        num_shares: how many shares a batch is cut into; 1 until something shards it.
        num_micro_batches: how many parts a share is cut into.
        micro_batch_size: instead: at most so many samples in a part.
    """

    num_samples: int
    batch_size: int
    remainder: str = "short"
    world_rank: int = 0
    world_size: int = 1
    rank: int = 0
    num_shares: int = 1
    num_micro_batches: int = 1
    micro_batch_size: int | None = None

    @property
    def updates_per_epoch(self) -> int:
        """How many batches an epoch has."""
        if self.remainder == "drop":
            return self.num_samples // self.batch_size
        return -(-self.num_samples // self.batch_size)

    @property
    def samples_per_epoch(self) -> int:
        """How many of the epoch's own samples are used; fewer than all only with "drop"."""
        return min(self.num_samples, self.updates_per_epoch * self.batch_size)

    def sharded(self) -> "Plan":
        """Return the plan with batches cut into one share a rank of the world."""
        return attrs.evolve(self, rank=self.world_rank, num_shares=self.world_size)

    def spans(self, start: int) -> Iterator[Span]:
        """Yield the global batches from sample `start` of an epoch on."""
        used = self.samples_per_epoch
        while start < used:
            stop = start + self.batch_size
            yield start, (stop if self.remainder == "pad" else min(stop, used))
            start = stop

    def num_batches(self, start: int) -> int:
        """Return how many batches are left from sample `start` of an epoch on."""
        return max(0, -(-(self.samples_per_epoch - start) // self.batch_size))

    def parts(self, batch: Span) -> list[Span]:
        """Return this rank's micro-batches of a global batch."""
        share = even_part(batch, self.rank, self.num_shares)
        count = self.num_micro_batches
        if self.micro_batch_size is not None:
            largest = -(-(batch[1] - batch[0]) // self.num_shares)
            count = max(1, -(-largest // self.micro_batch_size))
        return [even_part(share, i, count) for i in range(count)]

    def after(self, cursor: Cursor, batch: Span) -> Cursor:
        """Return the cursor behind a batch that began at `cursor`."""
        if batch[1] >= self.samples_per_epoch:
            return Cursor(cursor.epoch + 1, 0)
        return Cursor(cursor.epoch, batch[1])

    def check_start(self, cursor: Cursor) -> None:
        """Raise if an epoch of this plan has no sample at the cursor.

        Raises:
            BatchError: it does not; the data or its batch size changed.
        """
        if cursor.samples and cursor.samples >= self.samples_per_epoch:
            msg = (
                f"The cursor stands at sample {cursor.samples} of epoch {cursor.epoch},"
                f" but an epoch of this data has {self.samples_per_epoch}. Was the"
                " dataset or its batch size changed?"
            )
            raise BatchError(msg)


def even_part(span: Span, index: int, count: int) -> Span:
    """Return part `index` of `count`; sizes differ by at most one, larger ones first."""
    start, stop = span
    size, longer = divmod(stop - start, count)
    begin = start + index * size + min(index, longer)
    return begin, begin + size + (index < longer)
