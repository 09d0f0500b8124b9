# SPDX-License-Identifier: Apache-2.0
"""The mean over ranks by weight of numbers that cross them in few bits.

In two halves, as a sum over a ring is made: each rank sends every other its part of the
numbers, in few bits, and adds up those that it gets, as they are; then it sends the mean of its
part to all, in few bits again. So each number crosses twice, however many ranks there are.
What rounding leaves out is told to who rounds, who sends it the next time.
"""

from collections.abc import Callable

import torch

from accelfn.base.arguments import Number
from accelfn.base.pending import Pending
from accelfn.collectives.agreed import alike
from accelfn.collectives.both_ways import Work, start_spread, start_swap
from accelfn.collectives.few_bits import BLOCK, decoded, encoded
from accelfn.collectives.naming import naming
from accelfn.world import World

_OF_WEIGHT = 8
"""Bytes: a float64, at the end of what one rank sends another."""


def part_size(count: int, ranks: int) -> int:
    """Return how many of so many numbers a rank adds up: the same on all, in whole blocks."""
    return max(1, -(-count // (ranks * BLOCK))) * BLOCK


def start_parts(
    flat: torch.Tensor, weight: Number, ranks: World, bits: int, *, label: str
) -> tuple[Pending, torch.Tensor]:
    """Begin the first half: send each rank its part of a vector.

    Returns: what `start_mean` takes; and what rounding left out of the vector.
    """
    count, size = flat.numel(), part_size(flat.numel(), ranks.size)
    rows = flat.new_zeros(ranks.size, size)
    rows.view(-1)[:count] = flat
    coded = encoded(rows, bits)
    left = (rows - decoded(coded, bits, flat.dtype)).view(-1)[:count]
    seen = torch.zeros(1, dtype=torch.float64, device=flat.device) + weight
    told = seen.view(torch.uint8).expand(ranks.size, _OF_WEIGHT)
    given = torch.cat([coded, told], 1)
    got = torch.empty_like(given)
    ranks = alike(ranks, "all_to_all_single", label, [given])
    if ranks.size == 1:
        return Pending.of(given), left

    return _started(start_swap, got, given, ranks, label), left


def start_mean(
    received: torch.Tensor,
    ranks: World,
    bits: int,
    dtype: torch.dtype,
    *,
    label: str,
) -> tuple[Pending, torch.Tensor, torch.Tensor]:
    """Begin the second half: send all ranks the mean of this rank's part.

    Args:
        received: what arrived of the first half.
        ranks: who takes part.
        bits: of a number.
        dtype: in which numbers are added up.
        label: what the ranks are doing.

    Returns: what `mean_of` takes; what rounding left out of this rank's part of the mean; and
        the weight of all ranks. Where that is 0 the mean is 0.
    """
    coded, left, total = summed(received, bits, dtype)
    got = coded.new_empty(ranks.size, coded.numel())
    ranks = alike(ranks, "all_gather", label, [coded])
    if ranks.size == 1:
        return Pending.of(coded), left, total

    return _started(start_spread, got, coded[0], ranks, label), left, total


def summed(
    received: torch.Tensor, bits: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the mean of a part in few bits, what they leave out, and the weight of all."""
    coded, told = received.split([received.shape[1] - _OF_WEIGHT, _OF_WEIGHT], 1)
    weights = told.reshape(-1).clone().view(torch.float64).unsqueeze(1)
    total = weights.sum()
    share = torch.where(total > 0, weights / total, 0).to(dtype)
    mean = (decoded(coded, bits, dtype) * share).sum(0, keepdim=True)
    again = encoded(mean, bits)
    return again, (mean - decoded(again, bits, dtype))[0], total


def mean_of(gathered: torch.Tensor, bits: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the mean, and what fills up the last part, of what arrived of the second half."""
    return decoded(gathered, bits, dtype).view(-1)


def _started(
    start: Callable[[torch.Tensor, torch.Tensor, World], Work],
    got: torch.Tensor,
    given: torch.Tensor,
    ranks: World,
    label: str,
) -> Pending:
    with naming(label, ranks):
        work = start(got, given, ranks)

    def wait() -> torch.Tensor:
        with naming(label, ranks, begins=False):
            work.wait()
        return got

    return Pending(wait)
