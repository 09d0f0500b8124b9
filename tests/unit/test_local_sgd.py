# SPDX-License-Identifier: Apache-2.0
"""What `local_sgd` averages where no rank has seen a sample, and what it leaves alone."""

from functools import partial

import pytest
import torch
from torch import nn

import accelfn as af
from accelfn.testing import simulate
from tests.states import linear_state

STEP = af.make_step(lambda model, x: model(x).square().mean())
EVERY = af.local_sgd(sync_every=1)


@pytest.mark.parametrize("value", [1e-13, 1e-38, 1e38])
def test_a_mean_without_weights(value):
    """Where no rank's losses weigh anything, the mean of equal numbers is bitwise the number."""
    number = torch.full((1,), value)
    step = af.make_step(lambda model, _: af.Loss(model[0].sum() * 0, 0))

    def go(world):
        model = partial(nn.ParameterList, [number.clone()])
        state, _ = step(linear_state(model=model, setup=EVERY, world=world), None)
        return state.params["0"].clone()

    assert list(simulate(2, go)) == [number, number]


def test_hyperparameters_stay():
    """A learning rate that is a tensor is no state of a parameter: no rounding moves it."""
    rate = torch.tensor(0.1)

    def go(world):
        state = linear_state(
            2,
            optimizer=lambda named: torch.optim.Adam(named, lr=rate.clone()),
            setup=af.local_sgd(sync_every=1, opt_state=True),
            world=world,
        )
        for _ in range(20):
            state, _ = STEP(state, torch.ones(3 if world.rank else 7, 2))
        return state.opt_state["<group 0>"]["lr"].item()

    assert set(simulate(3, go)) == {rate.item()}


@pytest.mark.parametrize("size", [2, 3])
def test_what_others_evaluate_is_averaged_in_any_order(size):
    """Between two averages, an average over updates is that of all ranks, inside or around it."""

    def go(world, setup):
        state = linear_state(2, setup=setup, world=world)
        for _ in range(3):
            state, _ = STEP(state, torch.full((2, 2), 1.0 + world.rank))
        return af.eval_params(state)["weight"].clone()

    parts = (af.local_sgd(sync_every=8), af.ema(0.5))
    orders = (af.chain(*order) for order in (parts, parts[::-1]))
    found = [
        each for setup in orders for each in simulate(size, partial(go, setup=setup))
    ]
    assert all(torch.equal(each, found[0]) for each in found)


@pytest.mark.parametrize(("sizes", "updates"), [((2, 3), 1), ((3, 1), 2)])
def test_what_was_just_averaged_goes_to_other_ranks(sizes, updates, tmp_path):
    """Saved just after an average, what ranks have of their own is loaded as its plain mean."""
    create = partial(linear_state, 2, optimizer=torch.optim.Adam, setup=EVERY)

    def held(state):
        moments = (state.opt_state["weight"][m] for m in ("exp_avg", "exp_avg_sq"))
        return torch.cat([state.params["weight"].clone(), *moments])

    def save(world):
        state = create(world=world)
        for _ in range(updates):
            state, _ = STEP(state, torch.full((3, 2), world.rank + 1.0))
        af.save(state, tmp_path / "saved")
        return held(state)

    def load(world):
        return held(af.load(create(world=world), tmp_path / "saved"))

    expected = torch.stack(list(simulate(sizes[0], save))).mean(0)
    for found in simulate(sizes[1], load):
        assert torch.allclose(expected, found, rtol=1e-5, atol=0)
