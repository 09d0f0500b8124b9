# SPDX-License-Identifier: Apache-2.0
"""What the clipping transforms refuse, by name."""

import math

import pytest
import torch
from torch import nn

import accelfn as af
from tests.states import bits, linear_state


def test_a_name_that_is_another_groups_number():
    """A group named "1" and group 1 without a name would be one metric; named, they are two."""

    def create(setup: object, **more: str) -> af.TrainState:
        def optimizer(named: list) -> torch.optim.Optimizer:
            (_, weight), (_, bias) = named
            one, two = {"params": [weight], "name": "1"}, {"params": [bias], **more}
            return torch.optim.SGD([one, two], lr=0.1)

        make = lambda: nn.Linear(2, 1)  # noqa: E731
        return af.TrainState.create(model=make, optimizer=optimizer, setup=setup)

    clip = af.clip_grad_norm(0.1, per_group=True)
    with pytest.raises(
        af.errors.OptimizerError, match="groups 0 and 1 are both named '1'"
    ):
        create(clip)
    create(af.clip_grad_norm(0.1))
    step = af.make_step(lambda model, x: model(x).square().mean())
    _, metrics = step(create(clip, name="bias"), torch.ones(3, 2))
    assert {"grad_norm.1", "grad_norm.bias"} < set(metrics)


def test_complex_gradients():
    """Their elements have no order, so a bound on values names them; a norm they have."""

    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.tensor([3 + 4j]))

    def stepped(setup: object) -> af.TrainState:
        sgd = torch.optim.SGD
        state = af.TrainState.create(model=Complex, optimizer=sgd, setup=setup)
        step = af.make_step(lambda model, _: model.weight.abs().square().sum() / 2)
        return step(state, None)[0]

    with pytest.raises(af.errors.GradsError, match=r"gradient of 'weight' is complex"):
        stepped(af.clip_grad_value(0.5))
    stepped(af.clip_grad_norm(0.5))


@pytest.mark.parametrize("used", ["a", "b"])
def test_a_group_without_gradients(used):
    """A group whose parameters take no part in a loss has no norm, and the others are clipped."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = (nn.Parameter(torch.ones(2)) for _ in range(2))

    def optimizer(named: list) -> torch.optim.Optimizer:
        groups = [{"params": [param], "name": name} for name, param in named]
        return torch.optim.SGD(groups, lr=1.0)

    clip = af.clip_grad_norm(0.5, per_group=True)
    state = af.TrainState.create(model=Two, optimizer=optimizer, setup=clip)
    step = af.make_step(lambda model, _: 3 * getattr(model, used).sum())
    state, metrics = step(state, None)
    norms = {name for name in metrics if name.startswith("grad_norm.")}
    assert norms == {f"grad_norm.{used}"}
    for name, param in state.params.items():
        moved = (1 - param).norm()
        torch.testing.assert_close(moved, torch.tensor(0.5 if name == used else 0.0))


@af.transform
class Drops:
    """Leaves out all gradients."""

    def grads(self, grads, slot, update):
        return grads.with_tensors({}), slot


@pytest.mark.parametrize(
    "clip",
    [
        af.clip_grad_norm(0.5),
        af.clip_grad_norm(0.5, norm_type=math.inf),
        af.clip_grad_norm(0.5, per_group=True),
        af.clip_grad_value(0.5),
    ],
    ids=repr,
)
def test_where_there_are_no_gradients_none_are_clipped(clip):
    """Another transform left them out: an update without a norm, which changes nothing."""
    setup = af.chain(Drops(), clip)
    state = linear_state(setup=setup)
    before = bits(state.params)
    step = af.make_step(lambda model, x: model(x).square().mean())
    state, metrics = step(state, torch.ones(3, 1))
    assert (state.step, bits(state.params)) == (1, before)
    assert not [name for name in metrics if name.startswith("grad_norm")]
