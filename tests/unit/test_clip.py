# SPDX-License-Identifier: Apache-2.0
"""What the clipping transforms refuse, and what they do where gradients are missing."""

import math

import pytest
import torch
from torch import nn

import accelfn as af
from tests.states import bits, linear_state

STEP = af.make_step(lambda model, x: model(x).square().mean())


def test_complex_gradients():
    """Their elements have no order, so a bound on values names them; a norm they have."""

    def model():
        return nn.ParameterDict({"weight": torch.tensor([3 + 4j])})

    step = af.make_step(lambda model, _: model["weight"].abs().square().sum() / 2)
    with pytest.raises(af.errors.GradsError, match=r"gradient of 'weight' is complex"):
        step(linear_state(model=model, setup=af.clip_grad_value(0.5)), None)
    step(linear_state(model=model, setup=af.clip_grad_norm(0.5)), None)


@pytest.mark.parametrize("used", ["a", "b"])
def test_a_group_without_gradients(used):
    """A group whose parameters take no part in a loss has no norm, and the others are clipped."""

    def optimizer(named):
        groups = [{"params": [param], "name": name} for name, param in named]
        return torch.optim.SGD(groups, lr=1.0)

    state = linear_state(
        model=lambda: nn.ParameterDict({name: torch.ones(2) for name in "ab"}),
        optimizer=optimizer,
        setup=af.clip_grad_norm(0.5, per_group=True),
    )
    step = af.make_step(lambda model, _: 3 * model[used].sum())
    state, metrics = step(state, None)
    norms = [name for name in metrics if name.startswith("grad_norm.")]
    assert norms == [f"grad_norm.{used}"]
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
        af.clip_grad_norm(0.5, norm_type=math.inf),
        af.clip_grad_norm(0.5, per_group=True),
        af.clip_grad_value(0.5),
    ],
    ids=repr,
)
def test_where_there_are_no_gradients_none_are_clipped(clip):
    """Another transform left them out: an update without a norm, which changes nothing."""
    state = linear_state(setup=af.chain(Drops(), clip))
    before = bits(state.params)
    state, metrics = STEP(state, torch.ones(3, 1))
    assert (state.step, bits(state.params)) == (1, before)
    assert not [name for name in metrics if name.startswith("grad_norm")]
