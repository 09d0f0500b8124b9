# SPDX-License-Identifier: Apache-2.0
"""Numbers in few bits are the nearest that there are, and what is left out is exact."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import accelfn as af
from accelfn.testing import simulate
from tests.internals import (
    BLOCK,
    dequantize,
    few_bits,
    mean_of,
    num_bytes,
    quantize,
    start_mean,
    start_parts,
)

BITS = st.sampled_from([16, 8, 4])
FLOATS = st.sampled_from([torch.float32, torch.float64])


@st.composite
def rows(draw: st.DrawFn, *, finite: bool = True) -> torch.Tensor:
    """Draw rows of blocks, of any magnitudes."""
    dtype = draw(FLOATS)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    shape = draw(st.integers(1, 3)), draw(st.integers(1, 3)), BLOCK
    values = torch.randn(shape, dtype=dtype, generator=generator)
    exponents = torch.randint(-40, 40, shape[:2], generator=generator)
    values = torch.ldexp(values, exponents[..., None])
    most = draw(st.sampled_from([None, 7, 127, 32767]))
    if most is not None:  # so many steps, which are a power of two, to the last bit
        values[0, 0] = values[0, 0].sign() * most * 2.0 ** draw(st.integers(-9, 9))
    if not finite:
        values[0, 0, draw(st.integers(0, BLOCK - 1))] = draw(
            st.sampled_from([math.nan, math.inf, -math.inf])
        )
    return values.view(shape[0], -1)


@given(values=rows(), bits=BITS)
def test_they_are_the_nearest(values: torch.Tensor, bits: int) -> None:
    """Each is within half a step, and a step is at most the largest over 2**(bits - 2) - 1/2."""
    found = dequantize(quantize(values, bits), bits, values.dtype)
    blocks, near = values.view(-1, BLOCK), found.view(-1, BLOCK)
    most = (1 << (bits - 1)) - 1
    step = 2.0 ** (blocks.abs().amax(1, keepdim=True) / most).log2().ceil()
    assert ((blocks - near).abs() <= step.nan_to_num() / 2).all()
    assert torch.equal(near, (near / step).round() * step)


@given(values=rows(), bits=BITS)
def test_nothing_is_lost_between(values: torch.Tensor, bits: int) -> None:
    """What is left out, and what is sent, are the numbers bit by bit; sent again they stay."""
    found = dequantize(quantize(values, bits), bits, values.dtype)
    left = values - found
    assert torch.equal(left + found, values)
    assert torch.equal(dequantize(quantize(found, bits), bits, values.dtype), found)


@given(values=rows(), bits=BITS)
def test_they_take_so_many_bytes(values: torch.Tensor, bits: int) -> None:
    """So many bits a number, and a byte for a block."""
    coded = quantize(values, bits)
    assert coded.dtype == torch.uint8
    assert coded.shape == (len(values), num_bytes(values.shape[1], bits))
    assert num_bytes(values.shape[1], bits) == values.shape[1] * (bits + 1 / 16) / 8


@given(values=rows(finite=False), bits=BITS)
def test_what_is_not_finite_shows(values: torch.Tensor, bits: int) -> None:
    """A block with NaN or an infinity is NaN; its neighbours are as they were."""
    found = dequantize(quantize(values, bits), bits, values.dtype)
    sound = values.clone()
    sound[0, :BLOCK] = 0
    assert found[0, :BLOCK].isnan().all()
    found[0, :BLOCK] = 0
    assert torch.equal(found, dequantize(quantize(sound, bits), bits, values.dtype))


@given(
    count=st.sampled_from([1, BLOCK, 300]),
    weights=st.lists(st.sampled_from([0.0, 1.0, 3.0]), min_size=1, max_size=3),
    bits=BITS,
    seed=st.integers(0, 9),
)
def test_a_mean_is_of_what_was_sent(count, weights, bits, seed):
    """By weight, and 0 where nobody has any; with what is left out nothing is lost."""

    def average(world: af.World) -> tuple[torch.Tensor, ...]:
        generator = torch.Generator().manual_seed(10 * seed + world.rank)
        mine = torch.randn(count, dtype=torch.float64, generator=generator)
        parts, left = start_parts(mine, weights[world.rank], world, bits, label="parts")
        means, lost, weight = start_mean(
            parts.wait(), world, bits, mine.dtype, label="means"
        )
        found = mean_of(means.wait(), bits, mine.dtype)[:count]
        return mine - left, found, lost, weight

    sent, found, lost, total = zip(*simulate(len(weights), average), strict=True)
    sums = sum(weight * each for weight, each in zip(weights, sent, strict=True))
    expected = sums / sum(weights) if any(weights) else torch.zeros(count)
    assert all(torch.equal(each, found[0]) for each in found)
    assert {float(each) for each in total} == {sum(weights)}
    assert torch.allclose(found[0] + torch.cat(lost)[:count], expected.double())


class Written:
    """torch's calls, and which messages each rank asked for or sent."""

    def __init__(self, ranks: int) -> None:
        self.calls: list[list[str]] = [[] for _ in range(ranks)]

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def irecv(self, *args: Any, group: dist.ProcessGroup, **more: Any) -> Any:
        self.calls[group.rank()].append("asked")
        return dist.irecv(*args, group=group, **more)

    def isend(self, *args: Any, group: dist.ProcessGroup, **more: Any) -> Any:
        self.calls[group.rank()].append("sent")
        return dist.isend(*args, group=group, **more)


@given(
    ranks=st.integers(2, 4),
    columns=st.integers(1, 3),
    start=st.sampled_from([few_bits.start_swap, few_bits.start_spread]),
    users=st.integers(0, 2),
)
def test_messages_carry_what_a_collective_does(ranks, columns, start, users):
    """Over Gloo each rank asks for all rows before it sends any; a user's messages are others."""

    def program(world: af.World) -> None:
        rows = 100 * world.rank + torch.arange(ranks * columns).view(ranks, columns)
        given = rows if start is few_bits.start_swap else rows[0]
        expected, got = torch.empty(2, ranks, columns, dtype=torch.int64)
        start(expected, given, world).wait()
        to, sender = (world.rank + 1) % ranks, (world.rank - 1) % ranks
        among: Any = {"group": world.group}
        own = [dist.isend(-rows, group_dst=to, **among) for _ in range(users)]
        of_gloo.add(world.group)  # whose messages are simulated here
        work = start(got, given, world)
        work.wait()
        assert torch.equal(got, expected)
        for each in own:
            theirs = torch.empty_like(rows)
            dist.recv(theirs, group_src=sender, **among)
            each.wait()
            assert torch.equal(theirs, -rows + 100 * (world.rank - sender))

    written, of_gloo = Written(ranks), set[Any]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(few_bits, "dist", written)
        patch.setattr(few_bits, "carries", lambda group, _: group in of_gloo)
        simulate(ranks, program)
    each = ["asked"] * (ranks - 1) + ["sent"] * (ranks - 1)
    assert written.calls == [each] * ranks
