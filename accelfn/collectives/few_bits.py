# SPDX-License-Identifier: Apache-2.0
"""Numbers in 16, 8 or 4 bits: blocks of integers, with a power of two for each.

A power of two, so that what rounding leaves out of a number is itself a number of its dtype:
nothing is lost of what a sender remembers.
"""

from collections.abc import Callable

import torch

from accelfn.base.arguments import Number
from accelfn.base.tree import Pending
from accelfn.collectives.failures import check_same_tensors, naming
from accelfn.collectives.neighbors import Work, start_spread, start_swap
from accelfn.world import World

BLOCK = 128
"""Numbers that share a power of two, which is a byte more: 0.06 bits a number."""
_NOT_FINITE = -128
"""In the place of an exponent: the block has a number that is NaN or infinite."""
_SMALLEST, _LARGEST = -126, 127


def num_bytes(count: int, bits: int) -> int:
    """Return the bytes of so many numbers, a multiple of `BLOCK`."""
    return count * bits // 8 + count // BLOCK


def quantize(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Return numbers in few bits, to the nearest that there is.

    Args:
        values: rows of floating-point numbers, each a multiple of `BLOCK` long.
        bits: of a number.

    Returns: rows of bytes: integers, then exponents.
    """
    rows = values.shape[0]
    blocks = values.reshape(rows, -1, BLOCK)
    most = (1 << (bits - 1)) - 1
    largest = blocks.abs().amax(-1)
    fraction, exponent = torch.frexp(largest / most)
    exponent -= (fraction == 0.5).int()  # a power of two itself
    exponent = exponent.clamp(_SMALLEST, _LARGEST)
    finite = largest.isfinite()
    exponent = torch.where(finite, exponent, 0)
    steps = blocks * _power(-exponent, values.dtype)
    steps = torch.where(finite.unsqueeze(-1), steps, 0).round_().clamp_(-most, most)
    told = torch.where(finite, exponent, _NOT_FINITE).to(torch.int8)
    return torch.cat(
        [_pack_bits(steps, bits).view(rows, -1), told.view(torch.uint8)], 1
    )


def dequantize(coded: torch.Tensor, bits: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the numbers that rows of bytes stand for; a block that was not finite is NaN."""
    rows, size = coded.shape
    count = size * BLOCK // (BLOCK * bits // 8 + 1)
    split = [count * bits // 8, count // BLOCK]
    # of one row a slice passes for contiguous, and cannot be viewed as wider numbers
    integers, told = (part.reshape(-1).clone() for part in coded.split(split, 1))
    exponent = told.view(torch.int8).view(rows, -1)
    steps = _unpack_bits(integers, bits).to(dtype).view(rows, -1, BLOCK)
    values = steps * _power(exponent.to(torch.int32), dtype)
    lost = (exponent == _NOT_FINITE).unsqueeze(-1)
    return values.masked_fill_(lost, torch.nan).view(rows, count)


def _power(exponent: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a power of two for each block; one for each number would take ten times as long."""
    ones = torch.ones(exponent.shape, dtype=dtype, device=exponent.device)
    return torch.ldexp(ones, exponent).unsqueeze(-1)


def _pack_bits(steps: torch.Tensor, bits: int) -> torch.Tensor:
    """Return whole numbers as bytes; of 4 bits two in each."""
    if bits == 16:
        return steps.to(torch.int16).view(torch.uint8)
    whole = steps.to(torch.int8)
    if bits == 8:
        return whole.view(torch.uint8)
    pairs = whole.view(torch.uint8).view(*whole.shape[:-1], -1, 2)
    return (pairs[..., 0] & 15) | (pairs[..., 1] << 4)


def _unpack_bits(coded: torch.Tensor, bits: int) -> torch.Tensor:
    if bits == 16:
        return coded.view(torch.int16)
    if bits == 8:
        return coded.view(torch.int8)
    # a shift to the left, then one of a signed number to the right, repeats the sign
    low, high = (coded << 4).view(torch.int8) >> 4, coded.view(torch.int8) >> 4
    return torch.stack([low, high], -1)


# The mean over ranks by weight of numbers that cross them in few bits.
#
# In two halves, as a sum over a ring is made: each rank sends every other its part of the
# numbers, in few bits, and adds up those that it gets, as they are; then it sends the mean
# of its part to all, in few bits again. So each number crosses twice, however many ranks
# there are. What rounding leaves out is told to who rounds, who sends it the next time.


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
    coded = quantize(rows, bits)
    left = (rows - dequantize(coded, bits, flat.dtype)).view(-1)[:count]
    seen = torch.zeros(1, dtype=torch.float64, device=flat.device) + weight
    told = seen.view(torch.uint8).expand(ranks.size, _OF_WEIGHT)
    given = torch.cat([coded, told], 1)
    got = torch.empty_like(given)
    ranks = check_same_tensors(ranks, "all_to_all_single", label, [given])
    if ranks.size == 1:
        return Pending.of(given), left

    return _start_exchange(start_swap, got, given, ranks, label), left


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
    coded, left, total = reduce_quantized(received, bits, dtype)
    got = coded.new_empty(ranks.size, coded.numel())
    ranks = check_same_tensors(ranks, "all_gather", label, [coded])
    if ranks.size == 1:
        return Pending.of(coded), left, total

    return _start_exchange(start_spread, got, coded[0], ranks, label), left, total


def reduce_quantized(
    received: torch.Tensor, bits: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the mean of a part in few bits, what they leave out, and the weight of all."""
    coded, told = received.split([received.shape[1] - _OF_WEIGHT, _OF_WEIGHT], 1)
    weights = told.reshape(-1).clone().view(torch.float64).unsqueeze(1)
    total = weights.sum()
    share = torch.where(total > 0, weights / total, 0).to(dtype)
    mean = (dequantize(coded, bits, dtype) * share).sum(0, keepdim=True)
    again = quantize(mean, bits)
    return again, (mean - dequantize(again, bits, dtype))[0], total


def mean_of(gathered: torch.Tensor, bits: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the mean, and what fills up the last part, of what arrived of the second half."""
    return dequantize(gathered, bits, dtype).view(-1)


def _start_exchange(
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
