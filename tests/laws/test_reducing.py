# SPDX-License-Identifier: Apache-2.0
"""How gradients cross the ranks can be a user's own: exactly, or it is refused."""

from typing import ClassVar

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import accelfn as af
from accelfn.testing import simulate
from tests.laws.reducing import GatherAll, HalfPrecision, SumAll, weight_of
from tests.laws.worlds import alone, close_means, single, trained
from tests.ranks import programs
from tests.strategies import Run, differences, runs

sizes = st.integers(2, 4)


@given(
    run=runs(),
    size=sizes,
    parts=st.integers(1, 3),
    reduce=st.sampled_from([SumAll(), GatherAll()]),
)
def test_a_users_sum_is_that_of_all_ranks(run, size, parts, reduce):
    """A7: a reduce of public names gives what one process gives, and replicas the same bits."""
    expected, expected_means = alone(run)
    split = [af.shard_data(), reduce, af.accumulate(num_micro_batches=parts)]
    (first, _), *_ = per_rank = trained(size, run, *split)
    for states, means in per_rank:
        assert differences(expected[-1], states[-1], within=1e-9) == []
        assert all(map(close_means, expected_means, means))
        assert differences(first[-1], states[-1]) == []


@af.transform
class HalvesTheSum:
    """Let half of the gradients' sum cross the ranks."""

    def reduce(self, grads, slot, update):
        own = weight_of(grads, update.world)
        sums, weight = af.all_reduce((grads.tensors, own), update.world)
        return grads.with_sums({n: s / 2 for n, s in sums.items()}, weight), slot


@af.transform
class HalvesTheMean:
    """Halve the gradients of the mean."""

    def grads(self, grads, slot, update):
        return grads.map(lambda grad: grad / 2), slot


@given(run=runs(), size=st.integers(1, 4), parts=st.integers(1, 3))
def test_a_reduce_is_called_on_any_number_of_ranks(run, size, parts):
    """A7: one rank trains with a reduce as several do."""
    expected, _ = alone(run, HalvesTheMean())
    split = [af.shard_data(), HalvesTheSum(), af.accumulate(num_micro_batches=parts)]
    (states, _), *_ = trained(size, run, *split)
    assert differences(expected[-1], states[-1], within=1e-9) == []


@given(run=runs(optimizer="sgd"), size=sizes)
def test_a_users_sum_in_16_bits(run: Run, size: int) -> None:
    """A7: what crosses in 16 bits is near the mean, and the same on all ranks."""
    expected, _ = alone(run)
    (first, _), *others = trained(size, run, af.shard_data(), HalfPrecision())
    assert differences(expected[0], first[0], within=1e-2) == []
    for states, _ in others:
        assert differences(first[-1], states[-1]) == []


@af.transform
class OffBy:
    """Let one rank have another weight, or another bit in one gradient, than all others."""

    rank: int
    name_: str = ""

    def reduce(self, grads, slot, update):
        world = update.world
        sums, weight = af.all_reduce((grads.tensors, weight_of(grads, world)), world)
        if world.rank == self.rank and not self.name_:
            weight = torch.nextafter(weight, 2 * weight + 1)
        elif world.rank == self.rank:
            off = torch.nextafter(sums[self.name_], sums[self.name_] + 1)
            sums = {**sums, self.name_: off}
        return grads.with_sums(sums, weight), slot


@given(
    size=sizes,
    name=st.sampled_from(["", *sorted(Run().state().params)]),
    data=st.data(),
)
def test_sums_that_differ_by_rank_are_refused(size, name, data):
    """A7: one bit of the weight, or of a gradient, of one rank is told in its first update."""
    culprit = data.draw(st.integers(0, size - 1))
    setup = af.chain(af.shard_data(), OffBy(culprit, name_=name))
    run = Run(n=7, batch_size=7, updates=1, setup=setup)
    with pytest.raises(af.errors.ReplicaMismatchError) as caught:
        simulate(size, lambda world: programs.train(world, run))
    told = str(caught.value)
    assert f": {name or 'the weight'}: " in told
    assert "returned in update 0" in told


@af.transform
class OwnWeight:
    """Give the mean the way that `with_tensors` offers: times this rank's own weight."""

    def reduce(self, grads, slot, update):
        own = weight_of(grads, update.world)
        sums, weight = af.all_reduce((grads.tensors, own), update.world)
        means = {n: s / weight * own.clamp(min=1) for n, s in sums.items()}
        return grads.with_tensors(means), slot


@af.transform
class OnItsOwn:
    """Reduce nothing, and say so."""

    gives_up: ClassVar[dict[str, str]] = {"replicas_agree": "always"}

    def reduce(self, grads, slot, update):
        return grads, slot


@given(run=runs(updates=1), size=sizes)
def test_a_weight_of_one_rank_is_refused(run: Run, size: int) -> None:
    """A7: gradients that each rank would divide by a weight of its own are not applied."""
    run = attrs.evolve(run, setup=af.chain(af.shard_data(), OwnWeight()))
    with pytest.raises(af.errors.GradsError, match="with_sums"):
        simulate(size, lambda world: programs.train(world, run))
    with pytest.raises(af.errors.GradsError, match="with_sums"):
        programs.train(single(), run)
    apart = attrs.evolve(run, setup=af.chain(af.shard_data(), OnItsOwn()))
    local = attrs.evolve(
        run, setup=af.chain(af.shard_data(), af.local_sgd(sync_every=9))
    )
    for one, other in zip(
        simulate(size, lambda world: apart.train(apart.state(world))[0].params),
        simulate(size, lambda world: local.train(local.state(world))[0].params),
        strict=True,
    ):
        assert differences(dict(one), dict(other), within=1e-12) == []


@given(run=runs(updates=2), size=sizes)
def test_draws_in_a_reduce_are_shared(run: Run, size: int) -> None:
    """A7: what a reduce draws is the same on all ranks, so stochastic rounding agrees."""
    run = attrs.evolve(run, setup=af.chain(af.shard_data(), RoundsAtRandom()))
    first, *others = simulate(size, lambda world: programs.train(world, run)[0][-1])
    assert all(differences(first, other) == [] for other in others)


@af.transform
class RoundsAtRandom:
    """Round sums down or up, by chance."""

    def reduce(self, grads, slot, update):
        world = update.world
        sums, weight = af.all_reduce((grads.tensors, weight_of(grads, world)), world)
        rounded = {n: (s + torch.rand_like(s)).floor() for n, s in sums.items()}
        return grads.with_sums(rounded, weight), slot
