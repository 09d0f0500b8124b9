# SPDX-License-Identifier: Apache-2.0
"""What a model calls is where it computes: sent ahead, there when used, and within budgets."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

import accelfn as af
from tests.accelerator import streams, tested_device
from tests.accelerator.meter import metered
from tests.internals import devices
from tests.laws.test_placing import TREES, Node, breaking, look, values

pytestmark = pytest.mark.gpu
DEVICE = str(tested_device.DEVICE)
Pass = tuple[list[int], bool]
Seen = list[tuple[torch.Tensor, ...] | str]


class Blocks(nn.Module):
    """Drawn trees that are called in any order, some twice and some not at all."""

    def __init__(self, trees: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Node(tree) for tree in trees)

    def forward(self, x: torch.Tensor, order: list[int]) -> torch.Tensor:
        for number in order:
            x = self.blocks[number % len(self.blocks)](x)
        return x


@contextmanager
def without_streams() -> Iterator[None]:
    """Let nothing be sent ahead in the block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "can_pin", lambda _: False)
        yield


def passed(model: nn.Module, x: torch.Tensor, passes: list[Pass]) -> tuple[Seen, int]:
    """Return what a model's passes return, and the most bytes that they had of the device.

    Between passes the first parameter gets other values.
    """
    found, first = Seen(), next(model.parameters())
    with metered() as meter:
        for number, (order, is_broken) in enumerate(passes):
            if is_broken:
                with breaking(model, number), pytest.raises(OSError, match="broken"):
                    model(x, range(len(model.blocks)))
            found.append(tuple(model(x, order).view(-1).tolist()))
            first.data.mul_(0.5)
    return found, max(meter.peaks.values(), default=0)  # of hardware it knows nothing


CHAIN = [("linear", ())] * 4
IN_TURN = [([0, 1, 2, 3], False)] * 3


@example(trees=CHAIN, passes=IN_TURN, extra=100, seed=0)
@example(trees=CHAIN, passes=IN_TURN, extra=0, seed=0)
@example(
    trees=CHAIN,
    passes=[*IN_TURN[:1], ([0, 2, 1, 1], False), ([0, 1, 3], True), *IN_TURN],
    extra=100,
    seed=0,
)
@example(  # the first is sent in vain, and has other values when it is called
    trees=CHAIN,
    passes=[([1, 0], False), ([1, 2], False), ([0], False)],
    extra=100,
    seed=0,
)
@example(
    trees=CHAIN,
    passes=[([1, 0], False), ([1], False), ([0], False)],
    extra=100,
    seed=0,
)
@settings(max_examples=40)
@given(
    trees=st.lists(TREES, min_size=2, max_size=4),
    passes=st.lists(
        st.tuples(
            st.one_of(st.just([0, 1, 2, 3]), st.lists(st.integers(0, 3), min_size=1)),
            st.booleans(),
        ),
        min_size=2,
        max_size=4,
    ),
    extra=st.integers(0, 100),
    seed=st.integers(0, 9),
)
def test_what_is_sent_ahead_computes_the_same_in_its_budget(
    trees: Any, passes: list[Pass], extra: int, seed: int
) -> None:
    """Bitwise, in any order, after passes that broke off, with values that change between them.

    No more is on the device than without streams, or than the budget and what a whole model has.
    """
    torch.manual_seed(seed)
    model, x = Blocks(trees).eval(), torch.randn(3, 4, device=DEVICE)
    whole, plain = on_device(deepcopy(model)), deepcopy(model)
    plan = offloaded(model, extra)
    before = look(model)
    with torch.no_grad():
        expected, computing = passed(whole, x, passes)
    with without_streams(), af.on_devices(plain, plan) as lent:
        same, least = passed(lent, x, passes)
    with af.on_devices(model, plan) as lent:
        found, most = passed(lent, x, passes)
    assert expected == same == found
    assert most <= max(least, plan.room + computing)
    assert streams.UNDER_WAY == []
    assert before == look(model)
    now, others = values(model), values(plain)
    assert [name for name in now if not torch.equal(now[name], others[name])] == []


def on_device(model: nn.Module) -> nn.Module:
    """Return a model on the device, where what is tied stays so."""
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.data = tensor.data.to(DEVICE)
    return model


def offloaded(model: nn.Module, extra: int) -> af.typing.DeviceMap:
    """Return a plan with all on the host, and room for so many hundredths beside the largest."""
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.data = tensor.data.pin_memory()  # what is not is not sent ahead
    budgets = {DEVICE: 1 << 30, "cpu": 1 << 30}
    plan = af.plan_devices(model, budgets)
    for unit in plan.units:
        plan = plan.moved(unit.names[0], "cpu")
    total = sum(unit.num_bytes for unit in plan.units)
    budgets[DEVICE] = plan.needed(DEVICE) + total * extra // 100
    return af.typing.DeviceMap(plan.units, budgets=budgets)


@pytest.mark.parametrize(("extra", "waits"), [(0, 8), (25, 2), (100, 2)])
def test_a_device_waits_for_the_first_alone(extra, waits):
    """Of four equal units all others are there when called, if two have room; else none."""
    model, x = Blocks(CHAIN).eval(), torch.ones(3, 4, device=DEVICE)
    with af.on_devices(model, offloaded(model, extra)) as lent:
        lent(x, [0, 1, 2, 3])
        with tested_device.waits() as found:
            lent(x, [0, 1, 2, 3])
    assert len([each for each in found if each.startswith("weights/")]) == waits


# however parts of a model hang together

CONTAINER_KINDS = ["list", "dict", "called", "iterated", "numbers", "method", "bare"]
CONTAINERS = st.recursive(
    st.just(()),
    lambda inner: st.tuples(
        st.sampled_from(CONTAINER_KINDS), st.lists(inner, max_size=3)
    ),
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
@given(tree=CONTAINERS, seed=st.integers(0, 9), stays=st.booleans())
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
