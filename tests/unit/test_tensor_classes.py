# SPDX-License-Identifier: Apache-2.0
"""Tensor classes that no checkpoint can hold are rejected before a run has trained for long."""

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import accelfn as af


def two(tensor):
    """Return a tensor that keeps its values in two others."""
    return TwoTensor(tensor, tensor.clone())


class Wrapped(nn.Linear):
    """A layer with a weight of a tensor class of its own."""

    def __init__(self):
        super().__init__(2, 1)
        self.weight = nn.Parameter(two(torch.ones(1, 2)))


class Keeps(torch.optim.SGD):
    """An optimizer that keeps a tensor of such a class."""

    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param].setdefault("few_bits", two(torch.zeros(2)))
        return super().step(closure)


def test_a_parameter_is_rejected_by_its_name():
    """`create` names the parameter and its class."""
    with pytest.raises(
        af.errors.ModelError,
        match=r"weight is a TwoTensor.*cannot be saved in a checkpoint",
    ):
        af.TrainState.create(model=Wrapped, optimizer=torch.optim.SGD)


def test_an_entry_is_rejected_at_the_first_update():
    """The first update raises, and not the first save after a week."""
    state = af.TrainState.create(model=lambda: nn.Linear(2, 1), optimizer=Keeps)
    step = af.make_step(lambda model, batch: model(batch).sum())
    with pytest.raises(
        af.errors.OptimizerError, match=r"Keeps keeps.*cannot be saved in a checkpoint"
    ):
        step(state, torch.ones(1, 2))


@pytest.mark.parametrize("name", ["AdamW8bit", "Adam4bit", "AdamWFp8", "_AdamW"])
def test_torchao_s_optimizers_of_few_bits_are_rejected(name):
    """`create` rejects them; those with plain tensors pass."""
    optim = pytest.importorskip("torchao.optim", reason="torchao is optional")

    def create():
        optimizer = getattr(optim, name)
        return af.TrainState.create(model=lambda: nn.Linear(2, 1), optimizer=optimizer)

    if name == "_AdamW":
        create()
        return
    with pytest.raises(af.errors.OptimizerError, match=rf"{name}.*bitsandbytes"):
        create()
