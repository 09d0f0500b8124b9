# SPDX-License-Identifier: Apache-2.0
"""Axes and parts of a world: what they are, and what is refused by name."""

import math

import attrs
import pytest
import torch

import accelfn as af
from accelfn.errors import ArgumentError, DeadlockError, WorldError
from accelfn.testing import run_processes, simulate
from tests.internals import choose_axes, resolve_axes
from tests.states import linear_state


def test_what_is_left_is_filled_in():
    """-1 is what the other axes leave, and the order is the library's."""
    filled = resolve_axes("call", {"tp": 2, "dp_shard": -1}, 8)
    assert list(filled.items()) == [("dp_shard", 4), ("tp", 2)]
    assert resolve_axes("call", {"pp": 1, "cp": 3}, 3) == {"cp": 3}


def test_a_script_and_its_launcher_name_the_same_axes():
    """Either alone is taken; both may differ in axes of one rank, and else are refused."""
    assert choose_axes("call", None, None, 4) == choose_axes("call", None, "", 4) == {}
    assert choose_axes("call", None, "tp=2, dp_shard=-1", 4) == {"dp_shard": 2, "tp": 2}
    assert choose_axes("call", {"dp_shard": -1}, None, 4) == {"dp_shard": 4}
    agreed = choose_axes("call", {"dp_shard": -1, "cp": 1}, "dp_shard=4,tp=1", 4)
    assert agreed == {"dp_shard": 4, "cp": 1}
    with pytest.raises(ArgumentError, match="name different axes"):
        choose_axes("call", {"dp_shard": 4}, "dp_shard=2,dp_replicate=2", 4)


BAD = {
    "a product": ({"dp_shard": 3}, "the sizes, 3, is not the number of ranks, 4"),
    "too large a product": ({"dp_shard": 8}, "is not the number of ranks, 4"),
    "what is left": ({"dp_shard": -1, "tp": 3}, "is not the number of ranks"),
    "two are left": ({"dp_shard": -1, "tp": -1}, "only one axis can have the size -1"),
    "a name": ({"dp_shards": 4}, "'dp_shards' is not an axis.*Did you mean 'dp_shard'"),
    "no name": ({3: 4}, "3 is not an axis"),
    "a pipeline": ({"pp": 2, "tp": 2}, "does not support pipeline parallelism"),
    "no size": ({"tp": 0}, "expected a number of ranks, 1 or more, or -1"),
    "a truth": ({"tp": True}, "expected a number of ranks"),
    "a list": (["tp"], "expected sizes by name"),
}


@pytest.mark.parametrize("case", BAD)
def test_axes_that_cannot_be_are_refused(case):
    """By name, with what can be, in simulation, on processes and from the environment."""
    axes, words = BAD[case]
    with pytest.raises(ArgumentError, match=f"(?s)simulate.*{words}"):
        simulate(4, print, axes=axes)
    with pytest.raises(ArgumentError, match=f"(?s)run_processes.*{words}"):
        run_processes(4, print, axes=axes)
    if case != "two are left":
        with pytest.raises(ArgumentError, match="World.from_env"):
            af.World.from_env(axes=axes if case == "a list" else {"tp": 1, **axes})


def test_an_axis_that_is_not_there_is_of_one_rank():
    """So a program along "tp" runs in a world without it."""

    def program(world):
        part = world.along("tp")
        assert (part.rank, part.size, part.group) == (0, 1, None)
        return af.all_reduce(torch.tensor(float(world.rank)), part).item()

    assert simulate(2, program).results == (0.0, 1.0)
    assert simulate(2, program, axes={"cp": 2}).results == (0.0, 1.0)


TWO = {"dp_shard": 2, "tp": 2}
TAKEN = {"along": ["tp"], "split": [], "across": []}


@pytest.mark.parametrize("way", TAKEN)
def test_a_part_of_a_closed_world_is_closed(way):
    """It communicates no more than the whole, which cannot be divided any more."""
    worlds = []

    def take(world):
        given = {} if TAKEN[way] else {"size": 2}
        return getattr(world, way)(*TAKEN[way], **given)

    simulate(4, lambda world: worlds.append((world, take(world))), axes=TWO)
    for whole, part in worlds:
        with pytest.raises(WorldError, match="is closed"):
            af.barrier(part)
        if way != "along":
            with pytest.raises(WorldError, match="is closed"):
                take(whole)


def test_a_state_goes_on_along_axes_that_divide_its_work():
    """Moved to a world with an axis of which its setup knows nothing, it is refused at once."""

    def move(world):
        state = linear_state(world=world.split(size=1))
        with pytest.raises(
            WorldError, match=r"along 'tp': its 2 ranks would all do the"
        ):
            af.with_world(state, world)
        return world.connection.activity.trail

    for trail in simulate(2, move, axes={"tp": 2}):
        assert not any("with_world" in label for label, _ in trail)


def test_a_world_of_one_has_no_mesh():
    """Axes are opened by `from_env`; without a world -1 has no ranks to be the rest of."""
    with pytest.raises(WorldError, match=r'axes=\{"dp_shard": -1\}'):
        _ = af.World.single(device="cpu").mesh
    with pytest.raises(ArgumentError, match="because there is no world yet"):
        af.memory_estimate(
            lambda: torch.nn.Linear(2, 2),
            optimizer=torch.optim.AdamW,
            axes={"dp_shard": -1, "tp": 2},
        )


# parts by size and by machine

NO_PARTS = {
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


@pytest.mark.parametrize("case", NO_PARTS)
@pytest.mark.parametrize("way", ["split", "across"])
def test_parts_that_cannot_be_are_refused(way, case):
    """By the call, with what can be."""
    given, words = NO_PARTS[case]
    with pytest.raises(ArgumentError, match=f"World.{way}.*{words}"):
        simulate(4, lambda world: getattr(world, way)(**given))


def test_a_world_of_one_has_one_part():
    """Whatever is asked for; no other size divides it."""
    world = af.World()
    for part in (world.split(size=1), world.across(size=1), world.split(by="node")):
        assert (part.rank, part.size, part.group) == (0, 1, None)
    with pytest.raises(ArgumentError, match=r"expected a number that divides 1: 1\."):
        world.split(size=2)


EIGHT = {"dp_replicate": 2, "dp_shard": 2, "tp": 2}
REFUSED = {
    "axes between which another stands": (
        EIGHT,
        lambda world: world.along("dp_replicate", "tp"),
        "expected neighboring axes",
    ),
    "another axis": (EIGHT, lambda w: w.along("dp"), "'dp' is not an axis"),
    "a world by hand": (
        TWO,
        lambda w: af.World(rank=w.rank, size=4, group=w.group, axes=TWO),
        r"World.from_env\(axes=...\)",
    ),
    "a search of batch sizes": (
        {"tp": 2},
        lambda world: af.find_batch_size(lambda *_: None, 4, world),
        "without axes",
    ),
    "a part of a part": (
        TWO,
        lambda world: world.split(size=2).split(size=1),
        r"is itself a part\. Split world\.whole",
    ),
    "a part of an axis": (
        TWO,
        lambda world: world.along("tp").split(size=1),
        r"is itself a part\. Split world\.whole",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_group_is_refused(case):
    """By the call, with what can be."""
    axes, program, words = REFUSED[case]
    with pytest.raises((ArgumentError, WorldError), match=words):
        simulate(math.prod(axes.values()), program, axes=axes)


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
