# SPDX-License-Identifier: Apache-2.0
"""Models that are split do what one rank does where a unit is left out, or comes twice."""

from functools import partial

import pytest
import torch
from torch import nn

import accelfn as af
from accelfn.testing import simulate

sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.5)


class Blocks(nn.Module):
    """Layers in a list; a batch says how many it goes through."""

    def __init__(self, *, twice: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        one, two = nn.Linear(3, 3).double(), nn.Linear(3, 3).double()
        self.blocks = nn.ModuleList([one, two, one] if twice else [one, two])
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, most: int = 9) -> torch.Tensor:
        for block in self.blocks[:most]:
            x = self.drop(torch.tanh(block(x)))
        return x


def begun(world, model=Blocks, **options):
    return af.TrainState.create(
        model=model,
        optimizer=sgd,
        setup=af.chain(af.shard_data(), af.wrap_fsdp(**options)),
        world=world,
        data=af.Data(torch.arange(12.0).view(4, 3).double() / 12, global_batch_size=4),
    )


def trained(world, mosts, model=Blocks, **options):
    """Return the parameters after an update for each number of blocks."""
    state = begun(world, model, **options)
    for most in mosts:
        batch = next(iter(af.batches(state)))
        loss = lambda net, x, most=most: net(x, most).square().mean()  # noqa: E731
        state, _ = af.make_step(loss)(state, batch)
    return af.full_params(state, at="train")


def alike(one, other):
    return all(torch.allclose(one[n], other[n], rtol=1e-12) for n in one)


@pytest.mark.parametrize("keep_grads", ["whole", "sharded"])
def test_what_was_left_out_once_comes_back(keep_grads):
    """An update that needs less of the model says nothing of the next."""
    options = {"find_unused_parameters": True, "keep_grads": keep_grads}
    expected = trained(af.World.single(device="cpu"), [2, 1, 2], **options)
    for params in simulate(2, lambda w: trained(w, [2, 1, 2], **options)):
        assert alike(expected, params)


@pytest.mark.parametrize("unused", [False, True])
def test_a_block_that_is_used_twice_is_one_unit(unused):
    """It is split once, and has the gradients of both uses."""
    model = partial(Blocks, twice=True)
    expected = trained(af.World.single(device="cpu"), [9, 9], model)
    run = partial(trained, mosts=[9, 9], model=model, find_unused_parameters=unused)
    for params in simulate(2, run):
        assert alike(expected, params)


def test_evaluation_drops_nothing():
    """A split model is evaluated in evaluation mode, and is trained in training mode after it."""

    def fn(world):
        state = begun(world, partial(Blocks, dropout=0.9))
        loss = lambda net, x: net(x).square().mean()  # noqa: E731
        (found,) = af.evaluate(state, state.data, loss).values()
        whole = af.snapshot_model(state)
        with torch.no_grad():
            expected = loss(whole, torch.arange(12.0).view(4, 3).double() / 12)
        assert found == pytest.approx(expected.item(), rel=1e-12)
        _, metrics = af.make_step(loss)(state, next(iter(af.batches(state))))
        assert abs(metrics.all_reduce_mean(world)["loss"] - found) > 0.01

    simulate(2, fn)


def test_ranks_with_models_of_their_own_are_refused():
    """What is cut must have been the same on all ranks."""

    def fn(world):
        torch.manual_seed(world.rank)
        net = Blocks()
        af.TrainState.create(
            model=net,
            optimizer=sgd(net.parameters()),
            setup=af.wrap_fsdp(),
            world=world,
        )

    with pytest.raises(af.errors.ReplicaMismatchError, match="blocks.0.weight"):
        simulate(2, fn)


@pytest.mark.parametrize("look", ["once", "every update"])
@pytest.mark.parametrize("field", ["params", "opt_state"])
@pytest.mark.parametrize("axes", [{"dp_replicate": 2, "dp_shard": 2}, {"dp_shard": 4}])
def test_copies_that_differ_in_a_part_are_told(axes, field, look):
    """On all ranks, though one rank has it; one copy has nothing to be compared with."""
    if look == "every update" and field == "opt_state":
        return
    loss = lambda net, x: net(x).square().mean()  # noqa: E731

    def fn(world):
        more = (af.check_replicas(every=1),) if look == "every update" else ()
        state = begun(world)
        state = state.with_setup(af.chain(state.setup, *more))
        batch = next(iter(af.batches(state)))
        state, _ = af.make_step(loss)(state, batch)
        tensor = state.params["blocks.0.weight"]
        if field == "opt_state":
            tensor = state.opt_state["blocks.0.weight"]["momentum_buffer"]
        af.assert_replicas_agree(state)
        if world.rank == 2:
            tensor.to_local().view(-1)[0] += 1
        try:
            if look == "once":
                af.assert_replicas_agree(state)
            else:
                af.make_step(loss)(state, next(iter(af.batches(state))))
        except af.errors.ReplicaMismatchError as error:
            return "blocks.0.weight" in str(error)
        return None

    expected = True if "dp_replicate" in axes else None
    assert list(simulate(4, fn, axes=axes)) == [expected] * 4
