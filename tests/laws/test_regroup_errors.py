# SPDX-License-Identifier: Apache-2.0
"""Ranks that cannot go on with others are told so: nothing hangs, and nobody trains alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import accelfn as af
from accelfn.errors import (
    ArgumentError,
    PeerFailedError,
    RankCrashedError,
    SimulationError,
    StateError,
    WorldError,
)
from accelfn.testing import Crash, Raise, simulate
from tests.laws.elastic import Training, elastic


@given(size=st.integers(2, 4), least=st.integers(2, 4), gone=st.integers(0, 3))
def test_fewer_than_may_go_on_do_not(size: int, least: int, gone: int) -> None:
    """The run ends, and says which rank crashed; so does one that is not elastic."""
    least, gone = min(least, size), gone % size
    training = Training(setup=af.wrap_ddp(), every=1, updates=6)
    faults = [Crash(gone, step=2), Crash((gone + 1) % size, step=4)]
    for elastic_, planned in ((size, faults[:1]), (least, faults), (None, faults[:1])):
        if elastic_ is not None and size - len(planned) >= elastic_:
            continue
        with pytest.raises(RankCrashedError, match="crashed, as planned"):
            simulate(
                size,
                lambda world: elastic(world, training),
                faults=planned,
                elastic=elastic_,
            ) if elastic_ is not None else simulate(
                size,
                lambda world: training.train(training.state(world), 6),
                faults=planned,
            )


def test_a_rank_that_raises_ends_the_run():
    """An error is the program's, and the others would make it too."""
    training = Training(setup=af.wrap_ddp(), every=1, updates=6)
    with pytest.raises(ValueError, match="planned"):
        simulate(
            3,
            lambda world: elastic(world, training),
            faults=[Raise(1, step=3, error=ValueError)],
            elastic=1,
        )


def test_what_cannot_be_regrouped_is_refused():
    """Worlds that are not elastic, parts of one, and runs that cannot be so."""
    training = Training(setup=af.wrap_ddp(), every=1, updates=6)

    def not_elastic(world: af.World) -> None:
        with pytest.raises(WorldError, match="accelfn launch --elastic MIN:MAX"):
            af.regroup(training.state(world))

    def part(world: af.World) -> None:
        with pytest.raises(WorldError, match="of 1 ranks, is a part of another world"):
            af.regroup(training.state(world.split(size=1)))

    simulate(2, not_elastic)
    simulate(2, part, elastic=1)
    with pytest.raises(WorldError, match="accelfn launch --elastic MIN:MAX"):
        af.regroup(training.state(None))
    for options, said in (
        ({"elastic": 3}, r"elastic=3\): expected the smallest .* from 1 to 2"),
        ({"elastic": 1, "axes": {"dp_shard": 2}}, "Leave out axes= or elastic="),
        (
            {"faults": [Crash(1, step=1, returns=2)]},
            "Pass elastic=n, so that the run continues",
        ),
    ):
        with pytest.raises(ArgumentError, match=said):
            simulate(2, not_elastic, **options)


def test_a_part_of_a_model_that_is_gone_is_missed():
    """Of a model that is split no checkpoint in memory is left; those on a disk are."""
    training = Training(setup=af.wrap_fsdp(), every=1, updates=6)
    with pytest.raises(StateError, match="Continue from the last checkpoint"):
        simulate(
            3,
            lambda world: elastic(world, training),
            faults=[Crash(1, step=3)],
            elastic=1,
        )


def test_a_return_that_is_not_reached_is_an_error():
    """Of a planned fault nothing is left out in silence."""
    training = Training(setup=af.wrap_ddp(), every=1, updates=6)
    with pytest.raises(SimulationError, match="Rank 1 did not return, .* update 99"):
        simulate(
            3,
            lambda world: elastic(world, training),
            faults=[Crash(1, step=3, returns=99)],
            elastic=1,
        )


def test_who_has_not_come_in_does_not_train_alone():
    """A program that lets nobody in has no rank that trains by itself, and writes for all."""
    training = Training(setup=af.wrap_ddp(), every=1, updates=6)

    def fn(world: af.World) -> None:
        came_late = world.size == 1
        state = training.state(world)
        if came_late:
            with pytest.raises(WorldError, match=r"state = af\.regroup\(state\)"):
                training.train(state, 1)
            return
        with pytest.raises(PeerFailedError):
            training.train(state, 3)
        training.train(af.regroup(state), 3)

    simulate(3, fn, faults=[Crash(1, step=0, returns=2)], elastic=2)


def test_whoever_comes_back_in_vain_is_told_of():
    """A program that does not let in who waits is told so."""
    training = Training(setup=af.wrap_ddp(), every=1, updates=6)

    def fn(world: af.World) -> None:
        state = training.state(world)
        if world.size == 1:
            af.regroup(state)
        with pytest.raises(PeerFailedError):
            training.train(state.copy(), 2)
        training.train(af.regroup(state), 5)

    with pytest.raises(SimulationError, match="Rank 1 came back after its crash"):
        simulate(3, fn, faults=[Crash(1, step=1, returns=3)], elastic=1)


def test_the_old_world_says_where_the_ranks_are():
    """Whoever kept it is told to take that of the state."""
    training = Training(setup=af.wrap_ddp(), every=1, updates=4)

    def fn(world: af.World) -> int:
        state = training.state(world)
        with pytest.raises(PeerFailedError, match="rank 1 crashed, as planned"):
            training.train(state, 3)
        state = af.regroup(state)
        with pytest.raises(WorldError, match=r"use state.world of the new state"):
            af.barrier(world)
        af.barrier(state.world)
        return state.world.rank

    assert simulate(3, fn, faults=[Crash(1, step=0)], elastic=1).results == (0, None, 1)


def test_a_failed_run_says_how_it_was_elastic():
    """What repeats it has how few ranks may go on."""

    def fn(_world: af.World) -> None:
        raise ValueError

    with pytest.raises(ValueError) as raised:  # noqa: PT011 - its note is what is asked for
        simulate(2, fn, elastic=1)
    assert "elastic=1)" in raised.value.__notes__[0]
