# SPDX-License-Identifier: Apache-2.0
"""The orders in which simulated ranks' tensors are added up."""

import functools
import operator

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from accelfn.testing import simulate

ORDERS = ["ranks", "ring", "tree"]
SHAPES = st.lists(st.integers(0, 4), max_size=3)


def drawn(rank, shape, *, dtype=torch.float64):
    """Return a rank's numbers, whose sum depends on the order."""
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * 100).to(
        dtype
    )


def summed(size, shape, sums, *, dtype=torch.float64):
    """Return what each rank gets of the sum of all."""

    def fn(world):
        mine = drawn(world.rank, shape, dtype=dtype)
        dist.all_reduce(mine, group=world.group)
        return mine

    return simulate(size, fn, sums=sums).results


def order_at(place, numel, size, sums):
    """Return in which order ranks are added where a number lies, as nested pairs."""
    ranks = list(range(size))
    if sums == "ring":
        longer, rest = -(-numel // size), numel % size or size
        edge = longer * rest
        piece = (
            place // longer
            if place < edge
            else rest + (place - edge) // max(1, longer - 1)
        )
        ranks = [(piece + 1 + k) % size for k in range(size)]
    if sums != "tree":
        return functools.reduce(lambda one, two: (one, two), ranks)
    while len(ranks) > 1:
        ranks = [
            tuple(ranks[i : i + 2]) if i + 1 < len(ranks) else ranks[i]
            for i in range(0, len(ranks), 2)
        ]
    return ranks[0]


def added(order, numbers):
    """Add numbers in an order."""
    if isinstance(order, int):
        return numbers[order]
    return operator.add(*(added(each, numbers) for each in order))


@given(size=st.integers(1, 5), shape=SHAPES, sums=st.sampled_from(ORDERS))
def test_each_number_is_added_in_its_order(size, shape, sums):
    """From the first rank on; from another rank on in each piece; or by pairs; on all alike."""
    parts = [drawn(rank, shape).flatten().tolist() for rank in range(size)]
    found = summed(size, shape, sums)
    numel = len(parts[0])
    expected = [
        added(order_at(i, numel, size, sums), [part[i] for part in parts])
        for i in range(numel)
    ]
    for each in found:
        assert each.flatten().tolist() == expected
        assert list(each.shape) == shape


def test_orders_differ_where_there_are_several_ranks():
    """What a law says under one order it may not say under another; of two ranks there is one."""
    two, four = (
        [summed(size, [9], sums)[0].tolist() for sums in ORDERS] for size in (2, 4)
    )
    assert two == [two[0]] * 3
    assert four[0] != four[1] != four[2] != four[0]


@pytest.mark.parametrize("sums", ORDERS)
@pytest.mark.parametrize("op", ["SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"])
def test_integers_know_no_order(op, sums):
    """Every reduction of integers is the same in any order, and as torch's own."""
    single = {"SUM": torch.sum, "PRODUCT": torch.prod, "MIN": torch.amin}
    single |= {"MAX": torch.amax}
    size, shape = 3, (2, 4)
    parts = [drawn(rank, shape, dtype=torch.int64) for rank in range(size)]

    def fn(world):
        mine = parts[world.rank].clone()
        dist.all_reduce(mine, getattr(dist.ReduceOp, op), group=world.group)
        return mine

    bits = {"BAND": operator.and_, "BOR": operator.or_, "BXOR": operator.xor}
    expected = (
        single[op](torch.stack(parts), dim=0)
        if op in single
        else functools.reduce(bits[op], parts)
    )
    for found in simulate(size, fn, sums=sums):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("sums", ORDERS)
def test_shares_and_means_are_in_that_order_too(sums):
    """A root's sum, the parts of a scattered one and a mean are those of an all-reduce."""
    size = 3
    whole = summed(size, [size * 2], sums)[0]

    def fn(world):
        mine = drawn(world.rank, [size * 2])
        mean, root = mine.clone(), mine.clone()
        dist.all_reduce(mean, dist.ReduceOp.AVG, group=world.group)
        dist.reduce(root, dst=1, group=world.group)
        return mean, root

    for rank, (mean, root) in enumerate(simulate(size, fn, sums=sums)):
        assert torch.equal(mean, whole / size)
        assert torch.equal(root, whole) == (rank == 1)

    def scattered(world):
        parts = list(drawn(world.rank, [size * 2]).split(2))
        mine = torch.empty(2, dtype=torch.float64)
        dist.reduce_scatter(mine, parts, group=world.group)
        alone = parts[1].clone()
        dist.all_reduce(alone, group=world.group)
        return mine, alone

    ranks = simulate(size, scattered, sums=sums)
    assert torch.equal(ranks[1][0], ranks[1][1])


def test_sparse_tensors_have_one_order():
    """What has no place in a buffer is added from the first rank on."""

    def fn(world):
        mine = drawn(world.rank, [6]).to_sparse()
        dist.all_reduce(mine, group=world.group)
        return mine.to_dense()

    expected = summed(3, [6], "ranks")[0]
    for found in simulate(3, fn, sums="ring"):
        assert torch.equal(found, expected)
