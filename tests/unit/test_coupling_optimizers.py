# SPDX-License-Identifier: Apache-2.0
"""An optimizer that couples elements is found, by a few small parameters of each kind."""

from contextlib import nullcontext

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

import accelfn as af
from accelfn.errors import OptimizerError
from tests.internals import optimizer


class Coupling(torch.optim.SGD):
    """Divides gradients by their norms: in a group that says so, of one number of dims."""

    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None and param.ndim == group["couples"]:
                    param.grad /= param.grad.norm()
        super().step(closure)


def state_of(layers, couples, frozen=0, *, listed=True):
    """Return a state of layers: of each, the groups of its weight and its bias."""
    model = nn.Sequential(*(nn.Linear(6, 5) for _ in layers))
    groups = [{"params": [], "couples": dims} for dims in couples]
    for i, (weight, bias) in enumerate(layers):
        model[i].requires_grad_(i >= frozen)
        if i >= frozen or listed:
            groups[weight]["params"].append(model[i].weight)
            groups[bias]["params"].append(model[i].bias)
    optimizer = Coupling([each for each in groups if each["params"]], lr=0.1)
    return af.TrainState.create(model=model, optimizer=optimizer)


@given(
    layers=st.lists(st.tuples(*[st.integers(0, 1)] * 2), min_size=4, max_size=8),
    couples=st.sampled_from([[0, 0], [0, 1], [0, 2], [1, 0], [2, 0]]),
    frozen=st.integers(0, 3),
    listed=st.booleans(),
)
@example(layers=[(0, 0)] * 4, couples=[1, 0], frozen=2, listed=True)
def test_whatever_group_couples_elements_is_found(layers, couples, frozen, listed):
    """As if all were tried in their own shapes; what is frozen may be in no group."""
    state = state_of(layers, couples, frozen, listed=listed)
    is_coupled = any(
        dims == couples[group]
        for groups in layers[frozen:]
        for dims, group in zip((2, 1), groups, strict=True)
    )
    words = "by its own gradient only"
    with pytest.raises(OptimizerError, match=words) if is_coupled else nullcontext():
        optimizer.check_elements(state, "here", dims=(0, 1))


def test_layers_that_are_alike_are_not_all_tried():
    """Two of each kind are, however deep a model is."""
    shallow, deep = (state_of([(0, 0)] * n, [0]) for n in (2, 50))
    tried_shallow, tried_deep = (
        optimizer.try_optimizer(state, state.definition.optimizer)[0]
        for state in (shallow, deep)
    )
    assert list(tried_deep) == list(tried_shallow)
