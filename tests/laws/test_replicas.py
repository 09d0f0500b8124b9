# SPDX-License-Identifier: Apache-2.0
"""Ranks that hold different parameters are found out, and those that agree are let be."""

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import accelfn as af
from accelfn.testing import simulate
from tests.laws.worlds import DDP
from tests.ranks import programs
from tests.strategies import Run, runs

NAMES = sorted(Run().state().params)


@given(
    size=st.integers(2, 3),
    every=st.integers(1, 4),
    after=st.integers(1, 5),
    name=st.sampled_from(NAMES),
    data=st.data(),
)
def test_the_next_check_finds_one_element_of_one_rank(
    size: int, every: int, after: int, name: str, data: st.DataObject
) -> None:
    """All ranks raise after the update whose number is the next multiple; it names the tensor."""
    culprit = data.draw(st.integers(0, size - 1))
    run = Run(n=24, batch_size=4)
    setup = af.chain(DDP, af.check_replicas(every=every))
    run = attrs.evolve(run, setup=setup)
    due = (after // every + 1) * every

    def fn(world: af.World) -> tuple[int, str]:
        state = run.state(world)
        for _ in range(due + 1):
            if state.step == after and world.rank == culprit:
                state.params[name].view(-1)[-1] += 1
            update = state.step + 1
            try:
                state, _ = run.train(state, 1)
            except af.ReplicaMismatchError as error:
                return update, str(error)
        return 0, ""

    found = simulate(size, fn)
    looked = [each for each in found.log if "check_replicas" in str(each.label)]
    assert len(looked) == due // every
    updates, told = zip(*found.results, strict=True)
    assert updates == (due,) * size
    assert len(set(told)) == 1
    assert f"first that differs:\n  rank 0: {name}: checksum " in told[0]
    assert told[0].count(f": {name}: checksum ") == size


@given(run=runs(), size=st.integers(1, 3), every=st.integers(1, 3))
def test_a_check_changes_nothing(run: Run, size: int, every: int) -> None:
    """Ranks that agree train, bitwise, as without it."""
    plain = attrs.evolve(run, setup=DDP)
    looked = attrs.evolve(run, setup=af.chain(DDP, af.check_replicas(every=every)))
    before, after = (
        simulate(size, lambda world, each=each: programs.train(world, each)).results
        for each in (plain, looked)
    )
    for (states, means), (others, theirs) in zip(before, after, strict=True):
        assert means == theirs
        for one, other in zip(states, others, strict=True):
            assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("every", [1, 2])
def test_batch_statistics_may_differ(every: int) -> None:
    """Buffers that each rank counts for itself are no difference."""
    run = Run(n=16, batch_size=8, kind="norm", dyadic=False)
    run = attrs.evolve(run, setup=af.chain(DDP, af.check_replicas(every=every)))

    def fn(world: af.World) -> list[float]:
        state, _ = run.train(run.state(world), 2)
        return state.buffers["norm.running_mean"].tolist()

    first, second = simulate(2, fn).results
    assert first != second
