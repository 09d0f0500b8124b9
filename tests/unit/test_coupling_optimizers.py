# SPDX-License-Identifier: Apache-2.0
"""An optimizer that couples elements is found, by a few small parameters of each kind."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

import accelfn as af
from tests.internals import optimizer


class Coupling(torch.optim.SGD):
    """Divides gradients by their norms: in a group that says so, of one number of dims."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None and param.ndim == group["couples"]:
                    param.grad /= param.grad.norm()
        super().step(closure)


Layers = Sequence[tuple[int, int]]
"""Of each, the groups of its weight and its bias."""


def state_of(
    layers: Layers, couples: Sequence[int], frozen: int = 0, *, listed: bool = True
) -> af.TrainState:
    named = [(f"layer{i}", nn.Linear(6, 5)) for i in range(len(layers))]
    model = nn.Sequential(OrderedDict(named))
    groups = [{"params": [], "couples": dims} for dims in couples]
    for i, (weight, bias) in enumerate(layers):
        model[i].requires_grad_(i >= frozen)
        if i < frozen and not listed:
            continue
        groups[weight]["params"].append(model[i].weight)
        groups[bias]["params"].append(model[i].bias)
    return af.TrainState.create(
        model=model,
        optimizer=Coupling([each for each in groups if each["params"]], lr=0.1),
    )


@given(
    layers=st.lists(
        st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=4, max_size=8
    ),
    couples=st.sampled_from([[0, 0], [0, 1], [0, 2], [1, 0], [2, 0]]),
    frozen=st.integers(0, 3),
    listed=st.booleans(),
)
@example(layers=[(0, 0)] * 4, couples=[1, 0], frozen=2, listed=True)
def test_whatever_group_couples_elements_is_found(layers, couples, frozen, *, listed):
    """As if all were tried in their own shapes; what is frozen may be in no group."""
    state = state_of(layers, couples, frozen, listed=listed)
    is_coupled = any(
        dims == couples[group]
        for weight, bias in layers[frozen:]
        for dims, group in ((2, weight), (1, bias))
    )
    if not is_coupled:
        optimizer.check_elements(state, "here", dims=(0, 1))
        return
    with pytest.raises(af.errors.OptimizerError, match="by its own gradient only"):
        optimizer.check_elements(state, "here", dims=(0, 1))


def test_layers_that_are_alike_are_not_all_tried():
    """Two of each kind are, however deep a model is."""
    shallow, deep = (state_of([(0, 0)] * n, [0]) for n in (2, 50))
    tried_shallow, tried_deep = (
        optimizer.try_optimizer(state, state.definition.optimizer)[0]
        for state in (shallow, deep)
    )
    assert list(tried_deep) == list(tried_shallow)
