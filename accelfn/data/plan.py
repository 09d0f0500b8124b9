# SPDX-License-Identifier: Apache-2.0
"""Who takes which samples of an update: arithmetic on positions, before anything is read."""

import attrs

from accelfn.base.arguments import integer
from accelfn.data.cut import Span, even_part
from accelfn.errors import ArgumentError


@attrs.frozen(kw_only=True)
class Plan:
    """How every batch is cut, and which parts this rank takes.

    A transform's `data` method maps one plan to another. Parts of one batch differ by at
    most one sample and may be empty; together, in rank order, they are the batch.

    Attributes:
        world_rank: of the process.
        world_size: of its world.
        rank: which share this process takes.
        num_shares: how many shares a batch is cut into; 1 until something shards it.
        num_micro_batches: how many parts a share is cut into.
        micro_batch_size: instead: at most so many samples in a part.

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
        """Refuse a share that is none of those."""
        if self.rank >= self.num_shares:
            msg = (
                f"af.Plan(rank={self.rank}, num_shares={self.num_shares}): the shares are 0"
                f" to {self.num_shares - 1}."
            )
            raise ArgumentError(msg)

    def sharded(self) -> "Plan":
        """Return the plan with batches cut into one share a rank of the world."""
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
        """Return how many samples each share has of a batch, in each of its micro-batches."""
        batch, places = (0, num_samples), range(len(self.parts((0, num_samples))))
        shares = [even_part(batch, i, self.num_shares) for i in range(self.num_shares)]
        parts = [[even_part(share, i, len(places)) for i in places] for share in shares]
        return [tuple(stop - start for start, stop in each) for each in parts]
