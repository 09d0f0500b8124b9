# SPDX-License-Identifier: Apache-2.0
"""A model's tensors lie where they lie, and its parameters are trained: or it is refused."""

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

import accelfn as af
from accelfn.testing import assert_states_equal, simulate

FLOATS = 32
"""Of the memory in which all tensors of a model lie."""
NAMES = "abcd"


@st.composite
def places(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Draw where a tensor lies in a memory: shape, strides and the first element."""
    rows, columns = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    inner = draw(st.integers(1, 3))
    outer = (columns - 1) * inner + draw(st.integers(1, 3))
    shape, strides = ((rows, columns), (outer, inner))
    if draw(st.booleans()):
        shape, strides = shape[::-1], strides[::-1]
    last = sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    return shape, strides, draw(st.integers(0, FLOATS - 1 - last))


def elements(place: tuple[tuple[int, ...], tuple[int, ...], int]) -> set[int]:
    """Return which elements of the memory a tensor has, one by one."""
    (rows, columns), (outer, inner), first = place
    return {first + i * outer + j * inner for i in range(rows) for j in range(columns)}


class Placed(nn.Module):
    """Parameters, and perhaps a buffer, in one memory."""

    def __init__(self, drawn: list[Any], *, buffer: bool) -> None:
        super().__init__()
        memory = torch.linspace(-1, 1, FLOATS)
        for name, place in zip(NAMES, drawn, strict=False):
            view = memory.as_strided(*place)
            if buffer and name == "b":
                self.register_buffer(name, view)
            else:
                self.register_parameter(name, nn.Parameter(view))
        self.names = NAMES[: len(drawn)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = [getattr(self, name).square().sum() for name in self.names]
        return torch.stack(parts).sum() * x


def loss_fn(net: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return net(batch).mean()


@example(drawn=[((2, 2), (4, 1), 0), ((2, 2), (4, 1), 2)], buffer=False)  # in turns
@given(drawn=st.lists(places(), min_size=2, max_size=4), buffer=st.booleans())
def test_a_copy_trains_as_its_original(drawn: list[Any], buffer: bool) -> None:
    """L41: whatever memory tensors share, a copy takes the same updates; or it is refused."""
    having = [elements(place) for place in drawn]
    apart = all(a.isdisjoint(b) for i, a in enumerate(having) for b in having[:i])
    create = partial(
        af.TrainState.create,
        model=partial(Placed, drawn, buffer=buffer),
        optimizer=partial(torch.optim.SGD, lr=0.1),
    )
    if not apart:
        with pytest.raises(af.errors.ModelError, match="in the same memory"):
            create()
        return
    state = create()
    copy = state.copy()
    step = af.make_step(loss_fn)
    for _ in range(2):
        state, _ = step(state, torch.ones(2))
    for _ in range(2):
        copy, _ = step(copy, torch.ones(2))
    assert_states_equal(state, copy)


class Layers(nn.Module):
    """Parameters that a loss takes one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square()


PARAMETERS = [f"layers.{i}.{what}" for i in range(3) for what in ("weight", "bias")]


@given(
    st.sets(st.sampled_from(PARAMETERS), min_size=1, max_size=len(PARAMETERS) - 1),
    st.sampled_from([1, 2]),
    st.integers(0, 2),
)
def test_what_a_loss_freezes_is_trained_after_it(names, size, before):
    """L22: a loss that freezes is refused by name, and the next step is as if it never ran."""

    def train(world: af.World, *, freezes: bool) -> af.TrainState:
        state = af.TrainState.create(
            model=Layers,
            optimizer=partial(torch.optim.SGD, lr=0.1),
            setup=af.chain(af.shard_data(), af.wrap_ddp()),
            world=world,
        )
        batch = torch.arange(4.0).reshape(2, 2) - world.rank
        step = af.make_step(loss_fn)
        for _ in range(before):
            state, _ = step(state, batch)
        if freezes:

            def freezing(net: nn.Module, given: torch.Tensor) -> torch.Tensor:
                for name in names:
                    net.get_parameter(name).requires_grad_(requires_grad=False)
                return loss_fn(net, given)

            with pytest.raises(
                af.errors.LossError, match="requires_grad=False"
            ) as raised:
                af.make_step(freezing)(state, batch)
            assert all(name in str(raised.value) for name in names)
        state, _ = step(state, batch)
        return state

    for froze, plain in zip(
        simulate(size, partial(train, freezes=True)),
        simulate(size, partial(train, freezes=False)),
        strict=True,
    ):
        assert_states_equal(froze, plain)
