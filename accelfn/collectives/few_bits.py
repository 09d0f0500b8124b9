# SPDX-License-Identifier: Apache-2.0
"""Average floats over ranks in 16, 8 or 4 bits: blocks of integers with power-of-two scales.

With a power-of-two scale, the rounding error of a float is exact in the float's dtype. So a
sender can keep the error without loss, and add it to the next message (error feedback).
"""

from collections.abc import Callable
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist

from accelfn.base.arguments import Number
from accelfn.base.tree import Pending
from accelfn.collectives.failures import check_same_tensors, start
from accelfn.collectives.packed import carries
from accelfn.world import World

BLOCK = 128
"""Number of floats with the same scale; the scale takes one byte, 0.06 bits per float."""
_NOT_FINITE = -128
"""The exponent of a block that contains NaN or infinity."""
_SMALLEST, _LARGEST = -126, 127


def num_bytes(count: int, bits: int) -> int:
    """Return the number of bytes of `count` quantized floats; a multiple of `BLOCK`."""
    return count * bits // 8 + count // BLOCK


def quantize(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Quantize rows of floats to integers of `bits` bits, rounded to the nearest value.

    Args:
        values: rows of floats; the length of a row is a multiple of `BLOCK`.
        bits: the bits of an integer.

    Returns: a row of bytes for each row: first the integers, then the exponents of the scales.
    """
    rows = values.shape[0]
    blocks = values.reshape(rows, -1, BLOCK)
    most = (1 << (bits - 1)) - 1
    largest = blocks.abs().amax(-1)
    fraction, exponent = torch.frexp(largest / most)
    exponent -= (fraction == 0.5).int()  # largest / most is itself a power of two
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
    """Return floats from rows of bytes; a block that contained NaN or infinity becomes NaN."""
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
    """Return a power of two for each block; computing it for each float takes 10 times longer."""
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


# An asynchronous exchange of rows that uses both directions of a link at the same time.
#
# Gloo's all-to-all and all-gather send before they post their receives. The later of two ranks
# finds the other's request, sends all of its data, and queues its own request behind this
# data. So the two directions of the link are used one after the other. Here each rank posts all
# receives before it sends. On a link of 1 Mbit/s, an exchange of 8-bit numbers took a fifth
# less time. Gloo sends tensors of accelerators only in collectives, not in such messages.


_TAG_OF_PAIRS = 0x6163
"""The tag of accelfn's messages; a user's own messages should have other tags."""


class Work(Protocol):
    """A collective that has been started."""

    def wait(self) -> object:
        """Wait until the collective is complete."""
        ...


def start_swap(got: torch.Tensor, outgoing: torch.Tensor, ranks: World) -> Work:
    """Start an all-to-all: send one row to each rank, and receive one row from each rank."""
    if carries(ranks.group, got.device):
        return _Messages(got, outgoing, ranks)
    work = dist.all_to_all_single(got, outgoing, group=ranks.group, async_op=True)
    return cast("Work", work)


def start_spread(got: torch.Tensor, row: torch.Tensor, ranks: World) -> Work:
    """Start an all-gather of one row per rank."""
    if carries(ranks.group, got.device):
        return _Messages(got, row.expand_as(got), ranks)
    work = dist.all_gather(list(got), row, group=ranks.group, async_op=True)
    return cast("Work", work)


class _Messages:
    """Point-to-point messages: one row to each other rank, and one row from each of them."""

    def __init__(self, got: torch.Tensor, outgoing: torch.Tensor, ranks: World) -> None:
        peers = [(ranks.rank + hop) % ranks.size for hop in range(1, ranks.size)]
        among: dict[str, Any] = {"group": ranks.group, "tag": _TAG_OF_PAIRS}
        receives = [dist.irecv(got[r], group_src=r, **among) for r in peers]
        sends = [dist.isend(outgoing[r], group_dst=r, **among) for r in peers]
        got[ranks.rank] = outgoing[ranks.rank]
        self._works = cast("list[Work]", [*receives, *sends])
        self._given = outgoing  # keeps the memory alive until it is sent

    def wait(self) -> None:
        for work in self._works:
            work.wait()


# Weighted mean of a vector over ranks, sent as quantized floats.
#
# The exchange has two halves, like a ring all-reduce. First the vector is split into one part
# per rank: each rank sends the quantized parts to the ranks that own them, and sums the parts
# that it receives in full precision. Then each rank quantizes the mean of its part, and sends
# the mean to all ranks. So each float is sent twice, for any number of ranks. The rank that
# rounds a float keeps the rounding error, and adds it to its next message.


_OF_WEIGHT = 8
"""Number of bytes of the weight: a float64 at the end of each message."""


def part_size(count: int, ranks: int) -> int:
    """Return how many floats each rank sums; the number is a multiple of `BLOCK`."""
    return max(1, -(-count // (ranks * BLOCK))) * BLOCK


def start_parts(
    flat: torch.Tensor, weight: Number, ranks: World, bits: int, *, label: str
) -> tuple[Pending, torch.Tensor]:
    """Start the first half: send each rank its part of a vector.

    Returns: a `Pending` of the argument `rows` of `start_mean`, and the vector's rounding error.
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
    rows: torch.Tensor, ranks: World, bits: int, dtype: torch.dtype, *, label: str
) -> tuple[Pending, torch.Tensor, torch.Tensor]:
    """Start the second half: send the mean of this rank's part to all ranks.

    Args:
        rows: the result of the first half.
        ranks: the ranks that take part.
        bits: the bits of a quantized float.
        dtype: the dtype of the sum.
        label: the operation, for errors.

    Returns: a `Pending` of the argument `codes` of `mean_of`, the rounding error of this rank's
        part of the mean, and the total weight. If the total weight is 0, the mean is 0.
    """
    codes, error, total = reduce_quantized(rows, bits, dtype)
    return _start_exchange(start_spread, codes[0], ranks, label), error, total


def reduce_quantized(
    rows: torch.Tensor, bits: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the quantized mean of a part over the ranks, its rounding error, and the weight."""
    codes, weight_bytes = rows.split([rows.shape[1] - _OF_WEIGHT, _OF_WEIGHT], 1)
    weights = weight_bytes.reshape(-1).clone().view(torch.float64).unsqueeze(1)
    total = weights.sum()
    share = torch.where(total > 0, weights / total, 0).to(dtype)
    mean = (dequantize(codes, bits, dtype) * share).sum(0, keepdim=True)
    again = quantize(mean, bits)
    return again, (mean - dequantize(again, bits, dtype))[0], total


def mean_of(codes: torch.Tensor, bits: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the mean from the second half as a vector, including the padding at its end."""
    return dequantize(codes, bits, dtype).view(-1)


def _start_exchange(
    begin: Callable[[torch.Tensor, torch.Tensor, World], Work],
    outgoing: torch.Tensor,
    ranks: World,
    label: str,
) -> Pending:
    got = outgoing.new_empty(ranks.size, outgoing.shape[-1])
    if ranks.size == 1:
        return Pending.of(outgoing.view_as(got))
    ranks = check_same_tensors(ranks, begin.__name__, label, [outgoing])
    wait = start(lambda: begin(got, outgoing, ranks), label, ranks)

    def receive() -> torch.Tensor:
        wait()
        return got

    return Pending(receive)
