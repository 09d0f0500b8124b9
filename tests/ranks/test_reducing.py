# SPDX-License-Identifier: Apache-2.0
"""A user's own `reduce` on real ranks: it trains as on simulated ones, and is looked at."""

import attrs
import pytest

import accelfn as af
from accelfn.testing import simulate
from tests.laws.reducing import GatherAll, SumAll
from tests.processes import run_ranks
from tests.ranks import programs
from tests.strategies import Run, differences

pytestmark = pytest.mark.ranks(2)


@af.transform
class FromUpdate:
    """Sum as one must, and from some update on with this rank's own weight."""

    update: int

    def reduce(self, grads, slot, update):
        summed, slot = SumAll().reduce(grads, slot, update)
        if update.num_tried < self.update:
            return summed, slot
        return grads.with_sums(summed.tensors, grads.weight), slot


@pytest.mark.parametrize("reduce", [SumAll(), GatherAll()], ids=repr)
def test_real_ranks_sum_as_simulated_ones(reduce):
    """A7: on two ranks there is one order of sums, and so one result, bitwise."""
    setup = af.chain(af.shard_data(), reduce)
    run = Run(n=7, batch_size=3, updates=4, dyadic=False, setup=setup)
    expected = simulate(2, lambda world: programs.train(world, run))
    for (states, _), (others, _) in zip(
        expected, run_ranks(2, programs.train, run), strict=True
    ):
        assert differences(states[-1], others[-1]) == []


def told(world: af.World, run: Run, checked: bool) -> str:
    """Return what a rank is told."""
    world = attrs.evolve(world, group=world.connection, checked=checked)
    try:
        programs.train(world, run)
    except af.errors.ReplicaMismatchError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("update", "checked"), [(0, False), (2, True)])
def test_a_weight_of_one_rank_is_told_to_all(update, checked):
    """A7: real ranks compare in the first update, and in any where the world is checked."""
    setup = af.chain(af.shard_data(), FromUpdate(update))
    run = Run(n=9, batch_size=3, updates=3, setup=setup)
    for text in run_ranks(2, told, run, checked):
        assert "\n  rank 0: the weight: 2.0\n  rank 1: the weight: 1.0\n" in text


def means(world: af.World, names: list[list[str]]) -> str:
    """Return what a rank is told of the means of its own names, each of which is 1."""
    metrics = af.Metrics(dict.fromkeys(names[world.rank], (2.0, 2.0)))
    try:
        return repr(metrics.all_reduce_mean(world))
    except af.errors.CollectiveMismatchError as error:
        return str(error)


@pytest.mark.parametrize("more", [1, 4, 5, 9])
def test_metrics_of_fewer_names_are_told(more):
    """Gloo would abort the rank that gets more than it expects; as many names are added up."""
    many = [f"class {number}" for number in range(1 + more)]
    for text in run_ranks(2, means, [many[:1], many]):
        assert "the ranks have metrics with different names" in text
        assert '\n  rank 0: ["class 0"]\n  rank 1: ["class 0", "class 1"' in text
    assert run_ranks(2, means, [many, many]) == [repr(dict.fromkeys(many, 1.0))] * 2
