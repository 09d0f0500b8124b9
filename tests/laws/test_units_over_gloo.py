# SPDX-License-Identifier: Apache-2.0
"""Units that cross by all-to-all, as they do where Gloo joins ranks, are what torch's are."""

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import accelfn as af
from accelfn.testing import simulate
from tests.internals import (
    gather,
    gather_by_gloo,
    reduce_by_gloo,
    reduce_scatter,
    reduce_scatter_by_gloo,
)

RANKS = st.integers(2, 4)
COUNTS = st.integers(1, 5)
DTYPES = st.sampled_from([torch.float64, torch.float32, torch.bfloat16])
OPS = st.sampled_from([dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX])


@given(ranks=RANKS, count=COUNTS, dtype=DTYPES, early=st.booleans())
def test_a_unit_is_gathered(ranks, count, dtype, early):
    """All ranks' parts are there in order, where this one's lies in the result already."""

    def program(world: af.World) -> None:
        mine = torch.arange(count, dtype=dtype) + 8 * world.rank
        found: list[torch.Tensor] = []
        for make in (gather_by_gloo, gather):
            whole = torch.empty(ranks * count, dtype=dtype)
            part = whole[world.rank * count :][:count].copy_(mine)
            group: Any = world.group
            work: Any = make(whole, part, group, async_op=early)
            if early:
                assert work is not None
                work.wait()
            found.append(whole)
        assert torch.equal(*found)

    simulate(ranks, program)


@given(ranks=RANKS, count=COUNTS, dtype=DTYPES, op=OPS, early=st.booleans())
def test_gradients_are_reduced(ranks, count, dtype, op, early):
    """Each rank has the sum of its part, the mean, or what else is asked for."""

    def program(world: af.World) -> None:
        numbers = torch.arange(ranks * count, dtype=dtype)
        given = numbers * (1 + world.rank) - 4 * world.rank
        found: list[torch.Tensor] = []
        for reduce in (reduce_scatter_by_gloo, reduce_scatter):
            before = given.clone()
            part = torch.empty(count, dtype=dtype)
            group: Any = world.group
            work: Any = reduce(part, before, group, op=op, async_op=early)
            if early:
                work.wait()
            assert torch.equal(before, given)
            found.append(part)
        assert torch.equal(*found)

    simulate(ranks, program)


@st.composite
def buckets(draw: st.DrawFn) -> tuple[list[int], list[int], int]:
    """Draw the lengths of slices, the rank that holds each, and how many ranks there are."""
    ranks = draw(RANKS)
    lengths = draw(st.lists(st.integers(0, 4), min_size=1, max_size=6))
    holder = st.integers(0, ranks - 1)
    return lengths, [draw(holder) for _ in lengths], ranks


@given(
    bucket=buckets(),
    odd=st.just("")
    | st.sampled_from(["divided", "held by two", "summed apart", "narrow"]),
    users=st.integers(0, 1),
)
def test_gradients_come_to_who_holds_them(
    bucket: tuple[list[int], list[int], int], odd: str, users: int
) -> None:
    """DeepSpeed's buckets are what it makes of them, on the ranks that keep a part of each."""
    lengths, holders, ranks = bucket

    def program(world: af.World) -> None:
        group = world.group

        def everywhere(
            given: list[torch.Tensor], dtype: torch.dtype, **how: Any
        ) -> None:
            asked.append((dtype, how))
            for tensor, held_by in zip(given, how["bucket_ranks"], strict=True):
                total = tensor.clone()
                dist.all_reduce(total, group=group)
                if world.rank in held_by:
                    tensor.copy_(total)

        asked: list[Any] = []
        zero = SimpleNamespace(allreduce_and_copy_with_multiple_ranks=everywhere)
        reduce_by_gloo(zero, world)
        mine = [
            torch.arange(n, dtype=torch.float64) + 8 * world.rank + i
            for i, n in enumerate(lengths)
        ]
        expected, got = ([each.clone() for each in mine] for _ in "ab")
        held: list[frozenset[int]] = [frozenset({each}) for each in holders]
        how: dict[str, Any] = {"bucket_ranks": held, "output_bucket": [None] * len(got)}
        how["divide"], dtype = odd == "divided", torch.float64
        if odd == "held by two":
            how["bucket_ranks"] = [frozenset({0, 1}), *held[1:]]
        elif odd == "summed apart":
            how["output_bucket"] = [torch.zeros(lengths[0]), *[None] * (len(got) - 1)]
        elif odd == "narrow":
            dtype = torch.float32
        to, sender = (world.rank + 1) % ranks, (world.rank - 1) % ranks
        among: dict[str, Any] = {"group": group}
        own = torch.full((lengths[0],), -1.0 - world.rank, dtype=torch.float64)
        sent = [dist.isend(own, group_dst=to, **among) for _ in range(users)]
        zero.allreduce_and_copy_with_multiple_ranks(
            got, dtype, log=None, process_group=group, **how
        )
        assert asked == (
            [(dtype, {"log": None, "process_group": group, **how})] if odd else []
        )
        everywhere(expected, dtype, **how)
        for found, tensor in zip(got, expected, strict=True):
            assert torch.equal(found, tensor)
        for work in sent:
            theirs = torch.empty_like(own)
            dist.recv(theirs, group_src=sender, **among)
            work.wait()
            assert torch.equal(theirs, own - sender + world.rank)

    simulate(ranks, program)
