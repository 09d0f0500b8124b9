# SPDX-License-Identifier: Apache-2.0
"""What laws draw changes what they look at: no law holds because an input is ignored."""

import attrs
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import accelfn as af
from accelfn.testing import simulate
from accelfn.testing.strategies import Program
from tests.laws.worlds import DDP
from tests.strategies import LOSSES, Run, tensors

Turn = tuple[int, int]


def turns_of(
    size: int, rounds: int, schedule: list[int], **options: object
) -> list[Turn]:
    """Return which rank had its turn, and after how many barriers, as they had them."""
    turns: list[Turn] = []

    def fn(world: af.World) -> None:
        for number in range(rounds + 1):
            turns.append((world.rank, number))
            if number < rounds:
                dist.barrier(group=world.group)

    simulate(size, fn, schedule=schedule, **options)
    return turns


def turns_by_hand(size: int, rounds: int, schedule: list[int]) -> list[Turn]:
    """Return the same by what `simulate` says of schedules.

    Each time a rank waits or ends, a choice counts the ranks that can go on, from the one
    whose turn it was.
    """
    choices, entered, turns = iter(schedule), [0] * size, list[Turn]()
    last = 0
    while True:
        ring = [(last + i) % size for i in range(size)]
        able = [r for r in ring if entered[r] <= min(rounds, *entered)]
        if not able:
            return turns
        last = able[next(choices, 0) % len(able)]
        turns.append((last, entered[last]))
        entered[last] += 1


@given(
    size=st.integers(1, 4),
    rounds=st.integers(0, 3),
    schedule=st.lists(st.integers(0, 5), max_size=20),
)
def test_turns_are_taken_as_the_schedule_says(size, rounds, schedule):
    """Which rank runs when is what the schedule's indices choose, and nothing else."""
    assert turns_by_hand(size, rounds, schedule) == turns_of(size, rounds, schedule)


def test_schedules_give_other_orders():
    """Three choices of 3, 2 and 1 ranks, and the next of 3: each makes an order of its own."""
    drawn = [[i % 3, i // 3 % 3, i // 9 % 3, i // 27 % 3] for i in range(81)]
    assert len({tuple(turns_of(3, 2, each)) for each in drawn}) == 18


# Each field of a run, and two values of it with which runs differ


def trained(run: Run) -> dict[str, torch.Tensor]:
    """Return what two ranks have, and what is seen of the metrics."""

    def rank(world: af.World) -> tuple[dict[str, torch.Tensor], list[float]]:
        state, metrics = run.train(run.state(world))
        return tensors(state), [each.all_reduce_mean(world)["loss"] for each in metrics]

    (found, losses), _ = simulate(2, rank)
    return {**found, "losses": torch.tensor(losses, dtype=torch.float64)}


BASE = Run(n=10, batch_size=4, updates=3, dyadic=False, setup=DDP, loss="squared")
FIELDS = {
    "n": [10, 11],
    "batch_size": [4, 5],
    "updates": [3, 2],
    "kind": ["plain", "tied", "frozen"],
    "loss": sorted(LOSSES),
    "optimizer": ["sgd", "momentum", "adamw", "decay"],
    "setup": [DDP, af.chain(DDP, af.clip_grad_norm(0.01)), af.chain(DDP, af.ema(0.5))],
    "seed": [0, 1],
    "dyadic": [False, True],
    "shuffle": [True, False],
    "remainder": ["short", "pad", "drop"],
    "schedule": [False, True],
}


@pytest.mark.parametrize("field", [each.name for each in attrs.fields(Run)])
def test_each_field_of_a_run_matters(field):
    """No two values of a field that runs are drawn with train the same."""
    found = [trained(attrs.evolve(BASE, **{field: each})) for each in FIELDS[field]]
    for i, one in enumerate(found):
        for two in found[:i]:
            same = one.keys() == two.keys()
            assert not (same and all(torch.equal(one[name], two[name]) for name in one))


def test_each_field_of_a_program_is_drawn_and_given_on():
    """A run hands each of its fields on: a program has no other."""
    names = {each.name for each in attrs.fields(Program)}
    assert names == {*FIELDS, "dataset", "model"} - {"n", "kind", "dyadic"}
