# SPDX-License-Identifier: Apache-2.0
"""Parts of a world, along axes too: their calls meet one another alone; each is a world as any."""

from functools import partial
from typing import Any

import torch
from hypothesis import example, given
from hypothesis import strategies as st

import accelfn as af
from accelfn.testing import simulate
from tests.ranks.programs_of_parts import (
    Call,
    Program,
    peers_along,
    programs,
    programs_along_axes,
    trained,
)
from tests.states import bits

DATA = {"dp_replicate": 2, "dp_shard": 2}


def along(kind: str, *names: str) -> Program:
    return Program.along(DATA, (Call(kind, "along", names),))


@example(program=along("dtensor", "dp_replicate", "dp_shard"), schedule=[])
@example(program=Program((Call("gather", "across", None),), (0, 1, 1, 0)), schedule=[])
@example(program=along("gather", "dp_shard", "dp_replicate"), schedule=[])
@given(
    program=programs() | programs_along_axes(),
    schedule=st.lists(st.integers(0, 7), max_size=40),
)
def test_calls_in_parts_are_of_their_ranks(
    program: Program, schedule: list[int]
) -> None:
    """Ranks that differ in some axes only, neighbours or a machine's ranks, or those at one place
    in each; whatever the order of turns, and whoever else calls.
    """
    run = simulate(program.size, program, axes=program.axes, schedule=schedule)
    for rank, results in enumerate(run):
        assert results == program.expected(rank)


ALL_TWO = dict.fromkeys(("dp_replicate", "dp_shard", "tp"), 2)


@given(program=programs_along_axes(), named=st.booleans())
@example(program=Program.along(ALL_TWO, ()), named=True)
def test_parts_of_a_world_divide_it(program: Program, *, named: bool) -> None:
    """The ranks of `batch` take other samples, and those of `loss` other parts of the loss;
    without axes these are all ranks.
    """
    axes = program.axes if named else {}

    def places(world: af.World) -> list[tuple[int, int]]:
        batch, loss = world.batch, world.loss
        shard = batch.along("dp_shard")
        assert shard.rank == world.along("dp_shard").rank
        assert batch.whole is shard.whole is shard.along("dp_shard").whole is world
        assert not axes or world.along(*axes) is world
        return [(each.rank, each.size) for each in (batch, loss)]

    data = ("dp_replicate", "dp_shard")
    for rank, found in enumerate(simulate(program.size, places, axes=axes)):
        for place, names in zip(found, (data, (*data, "cp")), strict=True):
            names = names if named else tuple(program.axes)  # noqa: PLW2901
            peers = peers_along(program.axes, names, rank)
            assert place == (peers.index(rank), len(peers))


@given(
    size=st.sampled_from([1, 2, 3, 4]),
    count=st.integers(1, 4).filter(lambda n: n != 3),
    op=st.sampled_from(["sum", "mean", "max"]),
    seed=st.integers(0, 99),
)
def test_reduced_within_and_across_is_reduced(size, count, op, seed):
    """On integers bit by bit, over parts of one size, in either order."""

    def reduced(world: af.World) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(100 * seed + world.rank)
        value = 12.0 * torch.randint(-9, 9, (5,), generator=generator)
        within, across = world.split(size=size), world.across(size=size)
        assert (within.size, across.size) == (size, count)
        assert (across.rank, within.rank) == divmod(world.rank, size)
        orders = (within, across), (across, within)
        twice = [af.all_reduce(af.all_reduce(value, a, op), b, op) for a, b in orders]
        return [af.all_reduce(value, world, op), *twice]

    for whole, first, second in simulate(size * count, reduced):
        assert torch.equal(whole, first)
        assert torch.equal(whole, second)


@given(
    size=st.integers(1, 3),
    count=st.integers(1, 3),
    every=st.sampled_from([af.wrap_ddp(), af.local_sgd(sync_every=2)]),
    seed=st.integers(0, 9),
)
def test_a_part_trains_as_a_world_of_its_size(
    size: int, count: int, every: Any, seed: int
) -> None:
    """Steps, metrics, draws, averages and what is evaluated; other parts train something else."""
    parts = simulate(size * count, partial(trained, size, seed, every))
    for rank, found in enumerate(parts):
        part, place = divmod(rank, size)
        alone = simulate(size, partial(trained, size, seed + part, every))[place]
        assert found[:2] == alone[:2]
        assert bits(found[2:]) == bits(alone[2:])
