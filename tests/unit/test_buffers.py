# SPDX-License-Identifier: Apache-2.0
"""Buffers that a forward pass writes in ways that leave no trace, or may not write."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import accelfn as af

SGD = functools.partial(torch.optim.SGD, lr=0.1)
Pass = Callable[[nn.Module], object]


class Table(nn.Module):
    """A layer and buffers, one of which may be large, and what its forward does to them."""

    def __init__(self, forward_of: Pass, size: int = 3) -> None:
        super().__init__()
        self.layer, self.forward_of = nn.Linear(2, 1), forward_of
        self.register_buffer("table", torch.ones(size))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("none", None)
        self.register_buffer("twin", self.table)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.forward_of(self)
        return self.layer(x)


def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def still(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Take a loss in which buffers are left alone."""
    model.eval()
    try:
        return loss_fn(model, x)
    finally:
        model.train()


def begun(forward_of: Pass, *setup: object, size: int = 3) -> af.TrainState:
    model = functools.partial(Table, forward_of, size)
    return af.TrainState.create(
        model=lambda: nn.Sequential(model()), optimizer=SGD, setup=af.chain(*setup)
    )


REFUSED: dict[str, tuple[Pass, str]] = {
    "set": (lambda m: setattr(m, "none", torch.ones(())), "'0.none' was None, and was"),
    "unset": (lambda m: setattr(m, "count", None), "'0.count' was set to None"),
    "dtype": (
        lambda m: setattr(m, "count", m.count + 0.5),
        "'0.count' changed its dtype from torch.int64 to torch.float32",
    ),
    "data": (
        lambda m: setattr(m.table, "data", m.table.double()),
        "'0.table' changed its dtype from torch.float32 to torch.float64",
    ),
    "registered": (
        lambda m: m.register_buffer("later", torch.ones(())),
        "'0.later' was registered",
    ),
    "removed": (lambda m: delattr(m, "count"), "'0.count' was removed"),
    "shared": (
        lambda m: setattr(m, "twin", m.twin + 1),
        "'0.twin' is shared, and was replaced under one of its names",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_state_would_not_have(case):
    """A buffer that a pass makes, removes or makes another is named; the state is whole."""
    change, said = REFUSED[case]
    state, x = begun(change), torch.ones(3, 2)
    params = {name: param.clone() for name, param in state.params.items()}
    for _ in range(2):
        with pytest.raises(af.errors.ModelError, match=said):
            af.make_step(loss_fn)(state, x)
    assert all(torch.equal(params[name], state.params[name]) for name in params)
    assert state.buffers["0.table"].tolist() == [1, 1, 1]
    twin = begun(lambda _: None)
    twin, _ = af.make_step(still)(twin.with_params(params), x)
    state, _ = af.make_step(still)(state, x)
    for name, param in state.params.items():
        assert torch.equal(param, twin.params[name])


def test_no_buffer_at_all():
    """A model without any is refused one, too."""

    class Bare(nn.Linear):
        def forward(self, x):
            self.register_buffer("later", torch.ones(()))
            return super().forward(x)

    state = af.TrainState.create(model=lambda: Bare(2, 1), optimizer=SGD)
    with pytest.raises(af.errors.ModelError, match="'later' was registered"):
        af.make_step(loss_fn)(state, torch.ones(3, 2))


ASSIGNED: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "the batch": lambda _, x: x,
    "the weight": lambda model, _: model.layer.weight.detach(),
    "a view of the weight": lambda model, _: model.layer.weight.detach()[:, :1],
}


class Assigns(nn.Module):
    """Sets a buffer to a tensor of somebody else's, after it wrote into the last one."""

    def __init__(self, value: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.value = nn.Linear(2, 2), value
        start = value(self, torch.zeros(2, 2)).detach().clone()
        self.register_buffer("before", torch.zeros_like(start))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.layer(x) + self.before.sum()
        self.before.mul_(2.0)
        self.before = self.value(self, x)
        return out


@pytest.mark.parametrize("case", ASSIGNED)
def test_what_the_forward_pass_assigns_to_a_buffer_is_copied(case):
    """It keeps what it was set to: neither an update nor a pass writes into it from then on."""
    torch.manual_seed(0)
    model = Assigns(ASSIGNED[case])
    weight, bias = (p.detach().clone() for p in model.layer.parameters())
    before = torch.zeros_like(model.before)
    state = af.TrainState.create(model=model, optimizer=SGD)
    step, look = af.make_step(loss_fn), af.value_and_grad(loss_fn)
    batches = [torch.full((2, 2), float(i)) for i in range(1, 4)]
    for batch in batches:
        for each in batches:
            look(state, each)
        by_hand = nn.functional.linear(
            batch, weight.requires_grad_(), bias.requires_grad_()
        )
        loss = (by_hand + before.sum()).square().mean()
        before = {
            "the batch": batch,
            "the weight": weight.detach().clone(),
            "a view of the weight": weight.detach()[:, :1].clone(),
        }[case]
        grads = torch.autograd.grad(loss, (weight, bias))
        weight, bias = (
            (p - 0.1 * g).detach() for p, g in zip((weight, bias), grads, strict=True)
        )
        state, _ = step(state, batch)
        torch.testing.assert_close(state.buffers["before"], before)
        torch.testing.assert_close(state.params["layer.weight"], weight)
        for j, each in enumerate(batches, start=1):
            assert torch.equal(each, torch.full((2, 2), float(j)))


class Seen(nn.Module):
    """Counts what it sees in place, beginning with a constant of its class."""

    START = torch.zeros(1)

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.register_buffer("seen", self.START)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += len(x)
        return self.layer(x)


def test_a_constant_of_a_class_stays_what_it_is():
    """States of a module whose buffer is one do not count together, nor does the next."""

    def counted(updates):
        state = af.TrainState.create(
            model=Seen, optimizer=functools.partial(torch.optim.SGD, lr=0.1)
        )
        step = af.make_step(lambda net, x: net(x).square().mean())
        for _ in range(updates):
            state, _ = step(state, torch.ones(2, 1))
        return float(state.buffers["seen"])

    assert [counted(2), counted(0), counted(1)] == [4, 0, 2]
    assert float(Seen.START) == 0
