# SPDX-License-Identifier: Apache-2.0
"""What a transform draws for parameters that are split is what one rank draws for the whole."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import accelfn as af
from accelfn.testing import simulate

INPUTS = torch.linspace(-1, 1, 48).reshape(12, 4)

LIKE = {
    "randn_like": torch.randn_like,
    "rand_like": torch.rand_like,
    "randint_like": lambda tensor: torch.randint_like(tensor, 7),
    "in float64": lambda tensor: torch.randn_like(tensor, dtype=torch.float64).float(),
    "normal_": lambda tensor: torch.zeros_like(tensor).normal_(1.0, 2.0),
    "uniform_": lambda tensor: torch.empty_like(tensor).uniform_(-1, 1),
    "init": lambda tensor: nn.init.uniform_(torch.empty_like(tensor), 1, 2),
    "bernoulli_": lambda tensor: torch.zeros_like(tensor).bernoulli_(0.5),
    "dropout": lambda tensor: nn.functional.dropout(tensor, 0.5),
}


@af.transform
class Noise:
    """Adds what a function draws, to gradients and to parameters."""

    draw: object

    def grads(self, grads, slot, update):
        return grads.map(lambda each: each + self.draw(each)), slot

    def after_update(self, state, slot, update):
        moved = {name: each + self.draw(each) for name, each in state.params.items()}
        return state.with_params(moved), slot


def two_layers():
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))


SPLITS = {
    "fsdp": (af.wrap_fsdp, {}, (2, 3)),
    "units": (lambda: af.wrap_fsdp(units=nn.Linear), {}, (2, 3)),
    "hsdp": (af.wrap_fsdp, {"dp_replicate": 2, "dp_shard": 2}, (4,)),
    "tp": (lambda: af.tensor_parallel({"0": "column", "2": "row"}), {"tp": 2}, (2,)),
    "tp in fsdp": (
        lambda: af.chain(
            af.tensor_parallel({"0": "column", "2": "row"}), af.wrap_fsdp()
        ),
        {"dp_shard": 2, "tp": 2},
        (4,),
    ),
}


def trained(world, engine, draw):
    """Return all parameters after two updates."""
    state = af.TrainState.create(
        model=two_layers,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        setup=af.chain(af.shard_data(), engine, Noise(draw)),
        data=af.Data(INPUTS, global_batch_size=4),
        world=world,
    )
    step = af.make_step(lambda model, batch: model(batch).square().mean())
    for batch in af.batches(state, until_epoch=1):
        state, _ = step(state, batch)
        if state.step == 2:
            break
    return af.full_params(state)


@given(name=st.sampled_from([*LIKE]), split=st.sampled_from([*SPLITS]), data=st.data())
def test_what_is_split_has_the_noise_of_the_whole(name, split, data):
    """Parts of one parameter have noise of their own, and copies of a part the same."""
    wrap, axes, sizes = SPLITS[split]
    size, draw = data.draw(st.sampled_from(sizes)), LIKE[name]
    one = simulate(1, partial(trained, engine=af.wrap_ddp(), draw=draw)).results[0]
    among = simulate(size, partial(trained, engine=wrap(), draw=draw), axes=axes)
    for found in among.results:
        for each, expected in one.items():
            torch.testing.assert_close(found[each], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:DTensor random operators")  # which are torch's own
@pytest.mark.parametrize("split", ["fsdp", "hsdp"])
def test_what_is_drawn_for_a_sum_counts_once(split):
    """A sum over a split tensor, of which each rank has a term, has the noise of one."""
    wrap, axes, sizes = SPLITS[split]
    train = partial(trained, draw=lambda tensor: torch.randn_like(tensor.sum()))
    one = simulate(1, partial(train, engine=af.wrap_ddp())).results[0]
    for found in simulate(sizes[-1], partial(train, engine=wrap()), axes=axes).results:
        for each, expected in one.items():
            torch.testing.assert_close(found[each], expected, rtol=1e-5, atol=1e-5)


BY_VALUES = {
    "bernoulli": lambda tensor: torch.bernoulli(tensor.abs().clamp(max=1)),
    "bernoulli_": lambda tensor: torch.zeros_like(tensor).bernoulli_(
        tensor.abs().clamp(max=1)
    ),
}


@pytest.mark.parametrize("name", BY_VALUES)
def test_draws_by_the_values_of_parts_are_refused(name):
    """Each rank has a part of what says how to draw."""
    train = partial(trained, draw=BY_VALUES[name])
    simulate(1, partial(train, engine=af.wrap_ddp()))
    with pytest.raises(
        af.errors.ArgumentError, match="depend on the values of a sharded"
    ):
        simulate(2, partial(train, engine=af.wrap_fsdp()))
