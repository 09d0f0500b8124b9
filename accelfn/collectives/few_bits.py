# SPDX-License-Identifier: Apache-2.0
"""Quantize numbers to 16, 8 or 4 bits: blocks of integers with a power-of-two scale each.

With a power of two, the rounding error of a number is exact in the number's dtype. A sender
can therefore keep the error without loss (error feedback).
"""

from collections.abc import Callable

import torch

from accelfn.base.arguments import Number
from accelfn.base.tree import Pending
from accelfn.collectives.failures import check_same_tensors, naming
from accelfn.collectives.neighbors import Work, start_spread, start_swap
from accelfn.world import World

BLOCK = 128
"""Numbers per scale; the scale takes a byte, 0.06 bits per number."""
_NOT_FINITE = -128
"""The exponent that marks a block with a NaN or infinite number."""
_SMALLEST, _LARGEST = -126, 127


def num_bytes(count: int, bits: int) -> int:
    """Return the bytes of `count` quantized numbers, a multiple of `BLOCK`."""
    return count * bits // 8 + count // BLOCK


def quantize(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Round numbers to `bits` bits, to the nearest value.

    Args:
        values: rows of floating-point numbers, each a multiple of `BLOCK` long.
        bits: the size of a number.

    Returns: rows of bytes: integers, then exponents.
    """
    rows = values.shape[0]
    blocks = values.reshape(rows, -1, BLOCK)
    most = (1 << (bits - 1)) - 1
    largest = blocks.abs().amax(-1)
    fraction, exponent = torch.frexp(largest / most)
    exponent -= (fraction == 0.5).int()  # an exact power of two
    exponent = exponent.clamp(_SMALLEST, _LARGEST)
    is_finite = largest.isfinite()
    exponent = torch.where(is_finite, exponent, 0)
    steps = blocks * _power(-exponent, values.dtype)
    steps = torch.where(is_finite.unsqueeze(-1), steps, 0).round_().clamp_(-most, most)
    exponents = torch.where(is_finite, exponent, _NOT_FINITE).to(torch.int8)
    return torch.cat(
        [_pack_bits(steps, bits).view(rows, -1), exponents.view(torch.uint8)], 1
    )


def dequantize(codes: torch.Tensor, bits: int, dtype: torch.dtype) -> torch.Tensor:
    """Restore numbers from rows of bytes; a block with a non-finite number becomes NaN."""
    rows, size = codes.shape
    count = size * BLOCK // (BLOCK * bits // 8 + 1)
    split = [count * bits // 8, count // BLOCK]
    # a slice of one row counts as contiguous but cannot be viewed as a wider dtype
    integers, exponents = (part.reshape(-1).clone() for part in codes.split(split, 1))
    exponent = exponents.view(torch.int8).view(rows, -1)
    steps = _unpack_bits(integers, bits).to(dtype).view(rows, -1, BLOCK)
    values = steps * _power(exponent.to(torch.int32), dtype)
    is_nan = (exponent == _NOT_FINITE).unsqueeze(-1)
    return values.masked_fill_(is_nan, torch.nan).view(rows, count)


def _power(exponent: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a power of two per block; one per number would take ten times as long."""
    ones = torch.ones(exponent.shape, dtype=dtype, device=exponent.device)
    return torch.ldexp(ones, exponent).unsqueeze(-1)


def _pack_bits(steps: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack integers into bytes, two 4-bit integers per byte."""
    if bits == 16:
        return steps.to(torch.int16).view(torch.uint8)
    integers = steps.to(torch.int8)
    if bits == 8:
        return integers.view(torch.uint8)
    pairs = integers.view(torch.uint8).view(*integers.shape[:-1], -1, 2)
    return (pairs[..., 0] & 15) | (pairs[..., 1] << 4)


def _unpack_bits(codes: torch.Tensor, bits: int) -> torch.Tensor:
    if bits == 16:
        return codes.view(torch.int16)
    if bits == 8:
        return codes.view(torch.int8)
    # a left shift and an arithmetic right shift extend the sign
    low, high = (codes << 4).view(torch.int8) >> 4, codes.view(torch.int8) >> 4
    return torch.stack([low, high], -1)


# Weighted mean over ranks of quantized numbers.
#
# Two halves, like a ring all-reduce. First each rank sends every other rank its part of the
# numbers, quantized, and sums the parts that it receives in full precision. Then each rank
# sends the mean of its part to all ranks, quantized again. Each number is sent twice for any
# number of ranks. The rank that rounds keeps the rounding error and sends it the next time.


_OF_WEIGHT = 8
"""Bytes of the weight, a float64 at the end of each message."""


def part_size(count: int, ranks: int) -> int:
    """Return the numbers that each rank sums: equal on all ranks, in whole blocks."""
    return max(1, -(-count // (ranks * BLOCK))) * BLOCK


def start_parts(
    flat: torch.Tensor, weight: Number, ranks: World, bits: int, *, label: str
) -> tuple[Pending, torch.Tensor]:
    """Begin the first half: send each rank its part of a vector.

    Returns: the input of `start_mean`, and the rounding error of the vector.
    """
    count, size = flat.numel(), part_size(flat.numel(), ranks.size)
    rows = flat.new_zeros(ranks.size, size)
    rows.view(-1)[:count] = flat
    codes = quantize(rows, bits)
    error = (rows - dequantize(codes, bits, flat.dtype)).view(-1)[:count]
    wide_weight = torch.zeros(1, dtype=torch.float64, device=flat.device) + weight
    weights = wide_weight.view(torch.uint8).expand(ranks.size, _OF_WEIGHT)
    outgoing = torch.cat([codes, weights], 1)
    return _start_exchange(start_swap, outgoing, ranks, label), error


def start_mean(
    rows: torch.Tensor,
    ranks: World,
    bits: int,
    dtype: torch.dtype,
    *,
    label: str,
) -> tuple[Pending, torch.Tensor, torch.Tensor]:
    """Begin the second half: send all ranks the mean of this rank's part.

    Args:
        rows: the result of the first half.
        ranks: the ranks that take part.
        bits: the size of a number.
        dtype: the dtype of the sum.
        label: the operation, for errors.

    Returns: the input of `mean_of`, the rounding error of this rank's part of the mean, and
        the total weight. If the total weight is 0, the mean is 0.
    """
    codes, error, total = reduce_quantized(rows, bits, dtype)
    return _start_exchange(start_spread, codes[0], ranks, label), error, total


def reduce_quantized(
    rows: torch.Tensor, bits: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a part's quantized mean, its rounding error, and the total weight."""
    codes, weight_bytes = rows.split([rows.shape[1] - _OF_WEIGHT, _OF_WEIGHT], 1)
    weights = weight_bytes.reshape(-1).clone().view(torch.float64).unsqueeze(1)
    total = weights.sum()
    share = torch.where(total > 0, weights / total, 0).to(dtype)
    mean = (dequantize(codes, bits, dtype) * share).sum(0, keepdim=True)
    again = quantize(mean, bits)
    return again, (mean - dequantize(again, bits, dtype))[0], total


def mean_of(codes: torch.Tensor, bits: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the mean from the second half, including the padding of the last part."""
    return dequantize(codes, bits, dtype).view(-1)


def _start_exchange(
    start: Callable[[torch.Tensor, torch.Tensor, World], Work],
    outgoing: torch.Tensor,
    ranks: World,
    label: str,
) -> Pending:
    got = outgoing.new_empty(ranks.size, outgoing.shape[-1])
    if ranks.size == 1:
        return Pending.of(outgoing.view_as(got))
    ranks = check_same_tensors(ranks, start.__name__, label, [outgoing])
    with naming(label, ranks):
        work = start(got, outgoing, ranks)

    def wait() -> torch.Tensor:
        with naming(label, ranks, begins=False):
            work.wait()
        return got

    return Pending(wait)
