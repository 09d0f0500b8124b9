# SPDX-License-Identifier: Apache-2.0
"""The optimizers of lomo-optim do here what they do by themselves."""

from functools import partial
from typing import Any

import pytest
import torch
from lomo_optim import AdaLomo, Lomo
from torch import nn

import accelfn as af
from accelfn.errors import OptimizerError
from accelfn.testing import assert_states_equal, simulate

ROWS = torch.linspace(-1, 1, 24).reshape(8, 3)
LIVE = af.optimizer_in_backward()


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def mean_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return (model(batch) - 1).square().mean()


def trained(optimizer: Any, *setup: object, steps: int = 4) -> dict[str, torch.Tensor]:
    state = af.TrainState.create(
        model=net(), optimizer=optimizer, setup=af.chain(*setup)
    )
    step = af.make_step(mean_loss)
    for _ in range(steps):
        state, _ = step(state, ROWS)
    return {name: param.clone() for name, param in state.params.items()}


def by_itself(kind: Any, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Any:
    """Return what the package's own loop makes of the model; it wants a GPU."""
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)
    model = net()
    optimizer = kind(model, **options)
    for _ in range(4):
        optimizer.fused_backward(mean_loss(model, ROWS), options["lr"])
    return dict(model.named_parameters())


@pytest.mark.parametrize("setup", [(), (LIVE,)], ids=repr)
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Lomo, {"lr": 0.1}),
        (Lomo, {"lr": 0.1, "weight_decay": 0.5, "clip_grad_value": 0.01}),
        (AdaLomo, {"lr": 0.1, "loss_scale": None}),
        (AdaLomo, {"lr": 0.1, "loss_scale": None, "weight_decay": 0.5}),
    ],
)
def test_an_update_is_the_packages(monkeypatch, kind, options, setup):
    """In the backward pass or after it, parameters are bitwise those of the package's loop."""
    expected = by_itself(kind, monkeypatch, **options)
    own = {name: value for name, value in options.items() if name != "loss_scale"}
    found = trained(af.lomo(kind, **own), *setup)
    assert all(torch.equal(found[name], param) for name, param in expected.items())


def test_lomo_is_sgd():
    """What LOMO does is plain SGD; what it saves is the gradients' memory."""
    plain = trained(partial(torch.optim.SGD, lr=0.1))
    found = trained(af.lomo(Lomo, lr=0.1), LIVE)
    for name, param in plain.items():
        torch.testing.assert_close(found[name], param)


@pytest.mark.parametrize("kind", [Lomo, AdaLomo])
def test_on_ranks_with_a_schedule(kind):
    """Two ranks train what one does, at the schedule's rates."""

    def run(world: af.World) -> dict[str, torch.Tensor]:
        state = af.TrainState.create(
            model=net(),
            optimizer=af.lomo(kind, lr=0.1),
            schedule=af.schedules.linear(4),
            data=af.Data(ROWS, global_batch_size=6),
            setup=af.chain(af.shard_data(), af.wrap_ddp(), LIVE),
            world=world,
        )
        step = af.make_step(mean_loss)
        for batch in af.batches(state, until_epoch=2):
            state, _ = step(state, batch)
        return {name: param.clone() for name, param in state.params.items()}

    (alone,) = simulate(1, run).results
    for found in simulate(2, run).results:
        for name, param in alone.items():
            torch.testing.assert_close(found[name], param)


def test_moments_are_saved(tmp_path):
    """AdaLomo's moments belong to the state: saved, loaded, and gone on with bitwise."""

    def create() -> af.TrainState:
        return af.TrainState.create(
            model=net(), optimizer=af.lomo(AdaLomo, lr=0.1), setup=LIVE
        )

    step = af.make_step(mean_loss)
    state, _ = step(create(), ROWS)
    assert set(state.opt_state["0.weight"]) == {
        "step",
        "exp_avg_sq_row",
        "exp_avg_sq_col",
    }
    af.save(state, tmp_path / "saved")
    loaded = af.load(create(), tmp_path / "saved")
    assert_states_equal(state, loaded)
    assert_states_equal(step(state, ROWS)[0], step(loaded, ROWS)[0])


def test_what_it_cannot_do_is_refused():
    """Options that transforms stand for, and moments of what is no vector or matrix."""
    with pytest.raises(OptimizerError, match=r"clip_grad_norm=.*af\.clip_grad_norm"):
        af.lomo(Lomo, lr=0.1, clip_grad_norm=1.0)
    with pytest.raises(
        OptimizerError, match=r"0\.weight.*\(2, 1, 3, 3\).*af\.combine_optimizers"
    ):
        af.TrainState.create(
            model=lambda: nn.Sequential(nn.Conv2d(1, 2, 3)),
            optimizer=af.lomo(AdaLomo, lr=0.1),
        )
