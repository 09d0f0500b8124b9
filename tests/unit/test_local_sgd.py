# SPDX-License-Identifier: Apache-2.0
"""What `local_sgd` averages where no rank has seen a sample, and what it leaves alone."""

import functools

import pytest
import torch
from torch import nn

import accelfn as af
from accelfn.testing import simulate
from tests.states import linear_state


class One(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((1,), value))


@pytest.mark.parametrize("value", [1e-13, 1e-38, 1.0, 1e38])
def test_a_mean_without_weights(value):
    """Where no rank's losses weigh anything, the mean of equal numbers is bitwise the number."""

    def go(world: af.World) -> torch.Tensor:
        state = af.TrainState.create(
            model=functools.partial(One, value),
            optimizer=torch.optim.SGD,
            setup=af.local_sgd(sync_every=1),
            world=world,
        )
        step = af.make_step(lambda model, _: af.Loss(model.weight.sum() * 0, 0))
        state, _ = step(state, None)
        return state.params["weight"].clone()

    for found in simulate(2, go):
        assert found.item() == torch.full((1,), value).item()


def test_hyperparameters_stay():
    """A learning rate that is a tensor is no state of a parameter: no rounding moves it."""

    def go(world: af.World) -> float:
        state = linear_state(
            2,
            optimizer=lambda named: torch.optim.Adam(named, lr=torch.tensor(0.1)),
            setup=af.local_sgd(sync_every=1, opt_state=True),
            world=world,
        )
        step = af.make_step(lambda model, x: model(x).square().mean())
        for _ in range(20):
            state, _ = step(state, torch.ones(3 if world.rank else 7, 2))
        return state.opt_state["<group 0>"]["lr"].item()

    assert set(simulate(3, go)) == {torch.tensor(0.1).item()}


@pytest.mark.parametrize("size", [2, 3])
def test_what_others_evaluate_is_averaged_in_any_order(size):
    """Between two averages, an average over updates is that of all ranks, inside or around it."""
    step = af.make_step(lambda model, x: model(x).square().mean())

    def go(world: af.World, setup: object) -> torch.Tensor:
        state = linear_state(2, setup=setup, world=world)
        for _ in range(3):
            state, _ = step(state, torch.full((2, 2), 1.0 + world.rank))
        return af.eval_params(state)["weight"].clone()

    parts = (af.local_sgd(sync_every=8), af.ema(0.5))
    found = [
        each
        for order in (parts, parts[::-1])
        for each in simulate(size, functools.partial(go, setup=af.chain(*order)))
    ]
    assert all(torch.equal(each, found[0]) for each in found)


@pytest.mark.parametrize("sizes", [(2, 3), (3, 1)])
@pytest.mark.parametrize("updates", [1, 2])
def test_what_was_just_averaged_goes_to_other_ranks(sizes, updates, tmp_path):
    """Saved just after an average, what ranks have of their own is loaded as its plain mean."""
    step = af.make_step(lambda model, x: model(x).square().mean())

    def create(world: af.World) -> af.TrainState:
        return linear_state(
            2, optimizer=torch.optim.Adam, setup=af.local_sgd(sync_every=1), world=world
        )

    def held(state: af.TrainState) -> torch.Tensor:
        moments = (state.opt_state["weight"][m] for m in ("exp_avg", "exp_avg_sq"))
        return torch.cat([state.params["weight"].clone(), *moments])

    def save(world: af.World) -> torch.Tensor:
        state = create(world)
        for _ in range(updates):
            state, _ = step(state, torch.full((3, 2), world.rank + 1.0))
        af.save(state, tmp_path / "saved")
        return held(state)

    def load(world: af.World) -> torch.Tensor:
        return held(af.load(create(world), tmp_path / "saved"))

    expected = torch.stack(list(simulate(sizes[0], save))).mean(0)
    for found in simulate(sizes[1], load):
        assert torch.allclose(expected, found, rtol=1e-5, atol=0)
