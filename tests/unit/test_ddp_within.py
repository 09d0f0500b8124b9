# SPDX-License-Identifier: Apache-2.0
"""`wrap_ddp(within=)`: what it is written beside, and what is refused."""

from functools import partial

import pytest
import torch
from torch import nn

import accelfn as af
from accelfn.errors import ArgumentError, CompositionError, GradsError, WorldError
from accelfn.testing import simulate

SQUARE = {"dp_replicate": 2, "dp_shard": 2}
WORKER = af.wrap_ddp(within="dp_shard")
EVERY = af.local_sgd(sync_every=2)


def _state(world, *setup):
    return af.TrainState.create(
        model=partial(nn.Linear, 1, 1),
        optimizer=partial(torch.optim.SGD, lr=0.5),
        setup=af.chain(*setup),
        world=world,
    )


def _loss(model, x):
    return model(x).mean()


@pytest.mark.parametrize("within", ["tp", "cp", "node", 4, True])
def test_what_is_no_axis_of_samples_is_refused(within):
    """Along the others ranks have the same samples."""
    with pytest.raises(ArgumentError, match="expected an axis .*'dp_replicate' or"):
        af.wrap_ddp(within=within)


def test_workers_that_nothing_brings_together_are_refused():
    """When the setup is applied, in the transform's words."""
    with pytest.raises(CompositionError, match=r"no transform synchronizes .* Add"):
        _state(af.World(), WORKER)


def test_without_an_axis_there_is_nothing_to_reduce():
    """The refusal beside `local_sgd` says what is missing."""
    with pytest.raises(CompositionError, match=r'af.wrap_ddp\(within="dp_shard"\)'):
        af.chain(af.wrap_ddp(), EVERY)


def test_a_reduce_of_ones_own_is_refused():
    """It would see what DistributedDataParallel has averaged already."""

    @af.transform
    class Own:
        def reduce(self, grads, slot, update):
            return grads, slot

    with pytest.raises(CompositionError, match="no gradients to reduce, because"):
        af.chain(WORKER, Own())


@pytest.mark.parametrize("axes", [None, {"dp_replicate": 2}])
def test_an_axis_that_is_not_there_is_refused(axes):
    """When the state is made, with the axes that there are."""
    with pytest.raises(WorldError, match=r"needs a world with the axis 'dp_shard'"):
        simulate(2, lambda world: _state(world, WORKER, EVERY), axes=axes)


def test_a_world_of_one_trains_as_without():
    """It has no axes, and needs none."""
    x = torch.ones(4, 1)
    (left, _), (right, _) = (
        af.make_step(_loss)(_state(af.World(), *setup), x)
        for setup in [(WORKER, EVERY), ()]
    )
    assert torch.equal(left.params["weight"], right.params["weight"])


def test_gradients_that_stay_on_a_rank_are_refused():
    """`apply_grads` would let the ranks of a worker drift apart."""

    def program(world):
        state = _state(world, WORKER, EVERY)
        _, grads = af.value_and_grad(_loss)(state, torch.ones(1, 1), sync=False)
        af.apply_grads(state, grads)

    with pytest.raises(GradsError, match="not reduced over the 2 ranks"):
        simulate(4, program, axes=SQUARE)


def test_a_custom_step_reduces_within_a_worker():
    """`sync_grads` gives what the backward pass would have."""

    def program(world):
        state = _state(world, WORKER, EVERY)
        x = torch.full((1, 1), float(world.rank))
        _, own = af.value_and_grad(_loss)(state, x, sync=False)
        own = af.sync_grads(state, own)
        found = own.tensors["weight"].item()
        _, averaged = af.value_and_grad(_loss)(state, x)
        assert found == averaged.tensors["weight"].item()
        return found

    assert simulate(4, program, axes=SQUARE).results == (0.5, 0.5, 2.5, 2.5)


def test_metrics_are_of_all_workers():
    """A mean is over what all ranks of the world saw."""

    def program(world):
        state = _state(world, WORKER, EVERY)
        x = torch.full((1, 1), float(world.rank))
        _, metrics = af.make_step(lambda model, x: (0 * model(x) + x).mean())(state, x)
        return metrics.all_reduce_mean(world)["loss"]

    assert simulate(4, program, axes=SQUARE).results == (1.5,) * 4
