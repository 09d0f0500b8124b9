# SPDX-License-Identifier: Apache-2.0
"""Code on some ranks: where it runs, in which order, and what becomes of errors."""

from functools import partial

import pytest
import torch

import accelfn as af
from accelfn.testing import simulate

SCHEDULES = [(), (1, 1, 1), (2, 1, 0, 1), (0, 0, 2)]


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_on_one_rank(rank):
    """A function runs on the one rank, with its arguments; the others get None."""

    def fn(world):
        @af.on_rank(world, rank)
        def there(left, *, right):
            return world.rank, left, right

        assert there.__name__ == "there"
        return there(1, right=2)

    expected = [None] * 3
    expected[rank] = (rank, 1, 2)
    assert simulate(3, fn).results == tuple(expected)


@pytest.mark.parametrize("rank", [-1, 3, "0", True])
def test_on_a_rank_that_is_none(rank):
    """It is refused where it is decorated, on all ranks."""
    with pytest.raises(af.ArgumentError, match=r"on_rank.*0 to 2"):
        simulate(3, lambda world: af.on_rank(world, rank))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_main_goes_first(schedule):
    """No other rank enters the block before rank 0 has left it."""
    done = []

    def fn(world):
        with af.main_first(world):
            assert world.is_main or done[0] == 0
            done.append(world.rank)

    simulate(3, fn, schedule=schedule)
    assert done[0] == 0
    assert sorted(done) == [0, 1, 2]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_main_that_fails_lets_others_in(schedule):
    """Its error is the one that is shown, and nobody waits for it in vain."""
    entered = []

    def fn(world):
        with af.main_first(world):
            entered.append(world.rank)
            if world.is_main:
                msg = "no download"
                raise OSError(msg)

    with pytest.raises(OSError, match="no download"):
        simulate(3, fn, schedule=schedule)
    assert entered[0] == 0


def test_printing_in_order(capsys):
    """Rank 0 prints a line a rank, whoever comes first."""
    simulate(
        3, lambda w: af.print_in_order(w, "at", 10 * w.rank), schedule=(2, 1, 2, 0)
    )
    assert capsys.readouterr().out == "rank 0: at 0\nrank 1: at 10\nrank 2: at 20\n"


def state_on(world):
    return af.TrainState.create(
        model=lambda: torch.nn.Linear(2, 2),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        world=world,
    )


def test_replicas_that_agree():
    """Nothing is raised; one rank always agrees with itself."""
    for size in (1, 2, 3):
        simulate(size, lambda world: af.assert_replicas_agree(state_on(world)))


def test_replicas_that_differ():
    """The first tensor that differs is named on all ranks, with a row for each."""
    told = []

    def fn(world):
        state = state_on(world)
        state.params["bias"][1] += world.rank == 1
        try:
            af.assert_replicas_agree(state)
        except af.ReplicaMismatchError as error:
            told.append(str(error))

    simulate(3, fn)
    assert len(told) == 3
    assert len(set(told)) == 1
    assert "bias" in told[0]
    assert all(f"rank {rank}: " in told[0] for rank in range(3))


def test_replicas_of_a_donated_state():
    """It is refused as ever."""
    state = state_on(af.World.single())
    step = af.make_step(lambda model, batch: model(batch).sum())
    step(state, torch.ones(1, 2))
    with pytest.raises(af.StateDonatedError):
        af.assert_replicas_agree(state)
