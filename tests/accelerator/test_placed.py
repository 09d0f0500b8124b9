# SPDX-License-Identifier: Apache-2.0
"""What a model calls is where it computes, however its parts hang together."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import accelfn as af
from tests.accelerator.test_placed_ahead import DEVICE, offloaded, on_device
from tests.laws.test_placing import look

pytestmark = pytest.mark.gpu
KINDS = ["list", "dict", "called", "iterated", "numbers", "method", "bare"]
TREES = st.recursive(
    st.just(()),
    lambda inner: st.tuples(st.sampled_from(KINDS), st.lists(inner, max_size=3)),
    max_leaves=5,
)


class Inside(nn.Module):
    """A container of a drawn kind, within a layer, and what is done with what it holds."""

    def __init__(self, tree: Any) -> None:
        super().__init__()
        self.kind, inside = tree or ("leaf", [])
        parts = [Inside(each) for each in inside]
        self.layer = nn.Linear(4, 4)
        self.numbers = nn.ParameterList([torch.randn(4)] * (self.kind == "numbers"))
        if self.kind in ("iterated", "called"):
            self.parts = nn.Sequential(*parts)
        elif self.kind == "dict":
            self.parts = nn.ModuleDict({f"{i}": p for i, p in enumerate(parts)})
        elif self.kind == "bare":
            self.parts = nn.ModuleList([nn.ModuleList([p]) for p in parts])
        else:
            self.parts = nn.ModuleList(parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        for number in self.numbers:
            x = x * number
        if self.kind == "called":
            return self.parts(x)
        parts = self.parts.values() if self.kind == "dict" else self.parts
        for each in parts:
            if self.kind == "bare":
                x = each[0](x)
            else:
                x = each.also(x) if self.kind == "method" else each(x)
        return x

    def also(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + 1


@settings(max_examples=40)
@given(tree=TREES, seed=st.integers(0, 9), stays=st.booleans())
def test_parts_are_there_however_they_are_called(
    tree: Any, seed: int, stays: bool
) -> None:
    """Bitwise what a whole model on the device returns; iterated, by name, or by a method.

    A part may be called by itself, too, and its input follows.
    """
    torch.manual_seed(seed)
    model, x = Inside(tree), torch.randn(3, 4, device=DEVICE)
    whole = on_device(deepcopy(model))
    before = look(model)
    plan = offloaded(model, 0)
    if stays:
        plan = af.plan_devices(model, plan.budgets)
    with torch.no_grad():
        expected = [whole(x), *(each.also(x) for each in insides(whole))]
    with af.on_devices(model, plan) as lent:
        try:
            found = [lent(x), *(each.also(x.cpu()) for each in insides(lent))]
        except RuntimeError as error:
            pytest.fail(f"{tree}: {error}")
        assert all(map(torch.equal, expected, found))
    assert before == look(model)


def insides(model: nn.Module) -> list[Any]:
    return [each for each in model.modules() if isinstance(each, Inside)]


class Interrupted(nn.Module):
    """In whose forward Ctrl-C is pressed, while its numbers are where it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers, self.layer = nn.Parameter(torch.randn(4)), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x) * self.numbers
        raise KeyboardInterrupt


def test_ctrl_c_in_a_forward_leaves_all_at_home():
    """Torch runs no hook of a module that is interrupted; the block's end sends them back."""
    model, x = Interrupted(), torch.randn(3, 4, device=DEVICE)
    before, plan = look(model), offloaded(model, 0)
    with (
        pytest.raises(KeyboardInterrupt),
        torch.no_grad(),
        af.on_devices(model, plan) as lent,
    ):
        lent(x)
    assert before == look(model)
    assert {each.device.type for each in model.parameters()} == {"cpu"}
