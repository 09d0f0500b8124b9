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

TRAINING = Training(setup=af.wrap_ddp(), every=1, updates=6)
NOT_ELASTIC = "accelfn launch --elastic MIN:MAX"


def run(fault, training=TRAINING):
    """Let three ranks train, to one of which something happens."""
    simulate(3, lambda world: elastic(world, training), faults=[fault], elastic=1)


@given(size=st.integers(2, 4), least=st.integers(2, 4), gone=st.integers(0, 3))
def test_fewer_than_may_go_on_do_not(size, least, gone):
    """The run ends, and says which rank crashed; so does one that is not elastic."""
    least, gone = min(least, size), gone % size
    faults = [Crash(gone, step=2), Crash((gone + 1) % size, step=4)]

    def plain(world: af.World) -> None:
        TRAINING.train(TRAINING.state(world), 6)

    with pytest.raises(RankCrashedError, match="crashed, as planned"):
        simulate(size, plain, faults=faults[:1])
    for options in ({"elastic": size, "faults": faults[:1]}, {"elastic": least}):
        planned = {"faults": faults, **options}
        if size - len(planned["faults"]) < planned["elastic"]:
            with pytest.raises(RankCrashedError, match="crashed, as planned"):
                simulate(size, lambda world: elastic(world, TRAINING), **planned)


def test_what_ends_a_run_is_told():
    """An error, which the others would make too; a part of a split model that is gone.

    A planned return that is not reached is an error, too: nothing is left out in silence.
    """
    with pytest.raises(ValueError, match="planned") as raised:
        run(Raise(1, step=3, error=ValueError))
    assert "elastic=1)" in raised.value.__notes__[0]
    with pytest.raises(StateError, match="Continue from the last checkpoint"):
        run(Crash(1, step=3), Training(setup=af.wrap_fsdp(), every=1, updates=6))
    with pytest.raises(SimulationError, match="Rank 1 did not return, .* update 99"):
        run(Crash(1, step=3, returns=99))


def test_what_cannot_be_regrouped_is_refused():
    """Worlds that are not elastic, parts of one, and runs that cannot be so."""

    def not_elastic(world: af.World | None) -> None:
        with pytest.raises(WorldError, match=NOT_ELASTIC):
            af.regroup(TRAINING.state(world))

    def part(world: af.World) -> None:
        with pytest.raises(WorldError, match="of 1 ranks, is a part of another world"):
            af.regroup(TRAINING.state(world.split(size=1)))

    simulate(2, not_elastic)
    simulate(2, part, elastic=1)
    not_elastic(None)
    returns = [Crash(1, step=1, returns=2)]
    for options, said in (
        ({"elastic": 3}, r"elastic=3\): expected the smallest .* from 1 to 2"),
        ({"elastic": 1, "axes": {"dp_shard": 2}}, "Leave out axes= or elastic="),
        ({"faults": returns}, "Pass elastic=n, so that the run continues"),
    ):
        with pytest.raises(ArgumentError, match=said):
            simulate(2, not_elastic, **options)


def test_who_has_not_come_in_does_not_train_alone():
    """A program that lets nobody in has no rank that trains by itself, and writes for all."""

    def fn(world: af.World) -> None:
        state = TRAINING.state(world)
        if world.size == 1:  # it came late
            with pytest.raises(WorldError, match=r"state = af\.regroup\(state\)"):
                TRAINING.train(state, 1)
            return
        with pytest.raises(PeerFailedError):
            TRAINING.train(state, 3)
        TRAINING.train(af.regroup(state), 3)

    simulate(3, fn, faults=[Crash(1, step=0, returns=2)], elastic=2)


def test_whoever_comes_back_in_vain_is_told_of():
    """A program that does not let in who waits is told so."""

    def fn(world: af.World) -> None:
        state = TRAINING.state(world)
        if world.size == 1:
            af.regroup(state)
        with pytest.raises(PeerFailedError):
            TRAINING.train(state.copy(), 2)
        TRAINING.train(af.regroup(state), 5)

    with pytest.raises(SimulationError, match="Rank 1 came back after its crash"):
        simulate(3, fn, faults=[Crash(1, step=1, returns=3)], elastic=1)


def test_the_old_world_says_where_the_ranks_are():
    """Whoever kept it is told to take that of the state."""

    def fn(world: af.World) -> int:
        state = TRAINING.state(world)
        with pytest.raises(PeerFailedError, match="rank 1 crashed, as planned"):
            TRAINING.train(state, 3)
        state = af.regroup(state)
        with pytest.raises(WorldError, match="use state.world of the new state"):
            af.barrier(world)
        af.barrier(state.world)
        return state.world.rank

    assert simulate(3, fn, faults=[Crash(1, step=0)], elastic=1).results == (0, None, 1)
