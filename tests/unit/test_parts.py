# SPDX-License-Identifier: Apache-2.0
"""Parts of a world: opened once, closed with the whole, and refused where there are none."""

import attrs
import pytest
import torch

import accelfn as af
from accelfn.errors import ArgumentError, DeadlockError, WorldError
from accelfn.testing import simulate

BAD = {
    "nothing": ({}, r"expected either size=, a number of ranks, or by=\"node\""),
    "both": ({"size": 2, "by": "node"}, "expected either size="),
    "a size that does not divide": (
        {"size": 3},
        r"expected a number that divides 4: 1, 2, 4\.",
    ),
    "no size": ({"size": 0}, "a number that divides 4"),
    "a truth": ({"size": True}, "a number that divides 4"),
    "another word": ({"by": "host"}, 'expected by="node"'),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("way", ["split", "across"])
def test_parts_that_cannot_be_are_refused(way, case):
    """By the call, with what can be."""
    given, words = BAD[case]
    with pytest.raises(ArgumentError, match=f"World.{way}.*{words}"):
        simulate(4, lambda world: getattr(world, way)(**given))


def test_a_world_of_one_has_one_part():
    """Whatever is asked for; no other size divides it."""
    world = af.World()
    for part in (world.split(size=1), world.across(size=1), world.split(by="node")):
        assert (part.rank, part.size, part.group) == (0, 1, None)
    with pytest.raises(ArgumentError, match=r"expected a number that divides 1: 1\."):
        world.split(size=2)


def test_the_whole_is_split_alone():
    """Ranks of another part would not know of the parts of this one."""
    for of in (lambda w: w.split(size=2), lambda w: w.along("tp")):
        with pytest.raises(WorldError, match=r"is itself a part\. Split world\.whole"):
            simulate(4, lambda w, of=of: of(w).split(size=1), axes={"cp": 2, "tp": 2})


def test_machines_of_different_sizes_have_nothing_across():
    """They can be split, and the refusal names how many ranks each has."""

    def on_nodes(world):
        world = attrs.evolve(world, node_rank=min(world.rank, 1))
        assert world.split(by="node").size == (3 if world.rank else 1)
        world.across(by="node")

    with pytest.raises(WorldError, match="machines have 1, 3 ranks"):
        simulate(4, on_nodes)


def test_a_part_has_no_axes_and_knows_the_whole():
    """Its ranks are those that share batches and losses in it."""

    def look(world):
        part = world.split(size=2)
        assert part.whole is world
        assert part.axes == {}
        assert part.batch is part.loss is part
        assert part.along("dp_shard").size == 1
        return part.is_main

    assert simulate(4, look, axes={"dp_shard": 4}).results == (True, False) * 2


def test_parts_are_opened_once():
    """A second call gives what the first has opened; another size other groups."""

    def look(world):
        first, again = world.split(size=2), world.split(size=2)
        assert first.connection is again.connection
        assert world.across(size=2).connection is not first.connection

    simulate(4, look)


def test_a_part_of_a_closed_world_is_closed():
    """It communicates no more than the whole, which cannot be split any more."""
    worlds = []
    simulate(4, lambda world: worlds.append((world, world.split(size=2))))
    for whole, part in worlds:
        with pytest.raises(WorldError, match="is closed"):
            af.barrier(part)
        with pytest.raises(WorldError, match="is closed"):
            whole.split(size=2)


def test_calls_in_a_part_are_told_by_it():
    """In logs and in dead-locks."""
    run = simulate(4, lambda w: af.all_reduce(torch.ones(3), w.split(size=2)))
    assert [(each.group, each.ranks) for each in run.log] == [
        ("split(size=2)", (0, 1)),
        ("split(size=2)", (2, 3)),
    ]

    def stuck(world):
        if world.rank != 1:
            af.barrier(world.across(size=2))
            af.barrier(world.split(size=2))

    with pytest.raises(DeadlockError, match=r"across\(size=2\) of ranks 1, 3"):
        simulate(4, stuck)
