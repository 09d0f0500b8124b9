# SPDX-License-Identifier: Apache-2.0
"""Parts of a world: their calls meet one another alone, and each is a world as any."""

from functools import partial
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

import accelfn as af
from accelfn.testing import simulate
from tests.ranks.programs_of_parts import Program, programs, trained
from tests.strategies import differences


@given(program=programs(), schedule=st.lists(st.integers(0, 7), max_size=40))
def test_calls_in_parts_are_of_their_ranks(
    program: Program, schedule: list[int]
) -> None:
    """Neighbours or a machine's ranks, or those at one place in each; whoever else calls."""
    run = simulate(program.size, program, schedule=schedule)
    for rank, results in enumerate(run):
        assert results == program.expected(rank)


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
        for one, other in zip(alone[2:], found[2:], strict=True):
            assert differences(_flat(one), _flat(other)) == []


def _flat(values: Any) -> dict[str, torch.Tensor]:
    return {str(i): leaf for i, leaf in enumerate(_leaves(values))}


def _leaves(values: Any) -> list[torch.Tensor]:
    if isinstance(values, dict):
        return [leaf for name in sorted(values) for leaf in _leaves(values[name])]
    return [values] if isinstance(values, torch.Tensor) else []
