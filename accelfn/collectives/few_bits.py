# SPDX-License-Identifier: Apache-2.0
"""Numbers in 16, 8 or 4 bits: blocks of integers, with a power of two for each.

A power of two, so that what rounding leaves out of a number is itself a number of its dtype:
nothing is lost of what a sender remembers.
"""

import torch

BLOCK = 128
"""Numbers that share a power of two, which is a byte more: 0.06 bits a number."""
_NOT_FINITE = -128
"""In the place of an exponent: the block has a number that is NaN or infinite."""
_SMALLEST, _LARGEST = -126, 127


def num_bytes(count: int, bits: int) -> int:
    """Return the bytes of so many numbers, a multiple of `BLOCK`."""
    return count * bits // 8 + count // BLOCK


def encoded(values: torch.Tensor, bits: int) -> torch.Tensor:
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
    return torch.cat([_packed(steps, bits).view(rows, -1), told.view(torch.uint8)], 1)


def decoded(coded: torch.Tensor, bits: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the numbers that rows of bytes stand for; a block that was not finite is NaN."""
    rows, size = coded.shape
    count = size * BLOCK // (BLOCK * bits // 8 + 1)
    split = [count * bits // 8, count // BLOCK]
    # of one row a slice passes for contiguous, and cannot be viewed as wider numbers
    integers, told = (part.reshape(-1).clone() for part in coded.split(split, 1))
    exponent = told.view(torch.int8).view(rows, -1)
    steps = _unpacked(integers, bits).to(dtype).view(rows, -1, BLOCK)
    values = steps * _power(exponent.to(torch.int32), dtype)
    lost = (exponent == _NOT_FINITE).unsqueeze(-1)
    return values.masked_fill_(lost, torch.nan).view(rows, count)


def _power(exponent: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a power of two for each block; one for each number would take ten times as long."""
    ones = torch.ones(exponent.shape, dtype=dtype, device=exponent.device)
    return torch.ldexp(ones, exponent).unsqueeze(-1)


def _packed(steps: torch.Tensor, bits: int) -> torch.Tensor:
    """Return whole numbers as bytes; of 4 bits two in each."""
    if bits == 16:
        return steps.to(torch.int16).view(torch.uint8)
    whole = steps.to(torch.int8)
    if bits == 8:
        return whole.view(torch.uint8)
    pairs = whole.view(torch.uint8).view(*whole.shape[:-1], -1, 2)
    return (pairs[..., 0] & 15) | (pairs[..., 1] << 4)


def _unpacked(coded: torch.Tensor, bits: int) -> torch.Tensor:
    if bits == 16:
        return coded.view(torch.int16)
    if bits == 8:
        return coded.view(torch.int8)
    # a shift to the left, then one of a signed number to the right, repeats the sign
    low, high = (coded << 4).view(torch.int8) >> 4, coded.view(torch.int8) >> 4
    return torch.stack([low, high], -1)
