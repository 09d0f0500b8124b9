# SPDX-License-Identifier: Apache-2.0
"""Worlds of axes: calls along some of them are those of the ranks that differ in these only."""

from hypothesis import example, given
from hypothesis import strategies as st

import accelfn as af
from accelfn.testing import simulate
from tests.ranks.programs_of_axes import Call, Program, programs


@example(
    program=Program(
        {"dp_replicate": 2, "dp_shard": 2},
        (Call("dtensor", ("dp_replicate", "dp_shard")),),
    ),
    schedule=[],
)
@given(program=programs(), schedule=st.lists(st.integers(0, 7), max_size=40))
def test_calls_along_axes_are_of_the_ranks_that_differ_in_them(
    program: Program, schedule: list[int]
) -> None:
    """Whatever the axes and the order of turns, each rank meets those an array's slice names."""
    run = simulate(program.size, program, axes=program.axes, schedule=schedule)
    for rank, results in enumerate(run):
        assert results == program.expected(rank)


@given(program=programs(), named=st.booleans())
@example(
    program=Program(dict.fromkeys(("dp_replicate", "dp_shard", "tp"), 2), ()),
    named=True,
)
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
            peers = program.peers(rank, names if named else tuple(program.axes))
            assert place == (peers.index(rank), len(peers))
