# SPDX-License-Identifier: Apache-2.0
"""A step leaves nothing behind: not in tensors of the caller, nor in those of the next state."""

import copy
import warnings
from functools import partial
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import accelfn as af
from accelfn.testing import simulate

SETUPS = {
    "plain": af.chain(),
    "ddp": af.wrap_ddp(),
    "local_sgd": af.local_sgd(sync_every=2),
    "parts": af.accumulate(num_micro_batches=2),
}
LEAVES = {
    "none": lambda: torch.zeros(()),
    "tensor": lambda: torch.ones((), requires_grad=True),
    "criterion": lambda: nn.Parameter(torch.ones(())),
}


def create(world: af.World, setup: Any) -> af.TrainState:
    return af.TrainState.create(
        model=lambda: nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)),
        optimizer=partial(torch.optim.Adam, lr=0.1),
        setup=setup,
        world=world,
    )


@given(
    size=st.integers(1, 2),
    setup=st.sampled_from(["plain", "ddp", "local_sgd", "parts"]),
    leaf=st.sampled_from(sorted(LEAVES)),
    before=st.booleans(),
    in_batch=st.booleans(),
    num_updates=st.integers(1, 3),
)
def test_a_step_adds_to_no_gradient_of_the_caller(
    size, setup, leaf, before, in_batch, num_updates
):
    """Leaves that a loss captures, or that come in its batch, have the grad that they had."""
    size = size if setup in ("ddp", "local_sgd") else 1

    def rank(world: af.World) -> list[Any]:
        scale = LEAVES[leaf]()
        batch = torch.ones(4, 2, requires_grad=in_batch)
        if before:
            scale.grad = torch.tensor(7.0)
        state = create(world, SETUPS[setup])
        step = af.make_step(lambda model, x: (scale * model(x)).square().mean())
        given = [batch, batch] if setup == "parts" else batch
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", af.errors.AccelfnWarning)
            for _ in range(num_updates):
                state, _ = step(state, given)
        return [scale.grad, batch.grad]

    for found in simulate(size, rank):
        assert found == [torch.tensor(7.0) if before else None, None]


@given(
    num_updates=st.integers(1, 2),
    names=st.sets(st.sampled_from(["0.weight", "1.bias", "1.running_mean"])),
    kind=st.sampled_from(["requires_grad", "grad", "both"]),
)
def test_what_autograd_notes_of_a_state_ends_with_it(num_updates, names, kind):
    """A user who differentiates by a state's own tensors has not changed the next state."""
    world = af.World.single(device="cpu")
    state = create(world, None)
    step = af.make_step(lambda model, x: model(x).square().mean())
    for _ in range(num_updates):
        every = {**state.params, **state.buffers}
        for name in names:
            if kind != "grad":
                every[name].requires_grad_()
            if kind != "requires_grad":
                every[name].grad = torch.zeros_like(every[name])
        state, _ = step(state, torch.ones(4, 2))
        for each in (*state.params.values(), *state.buffers.values()):
            assert (each.requires_grad, each.grad) == (False, None)


@af.transform
class _Rates:
    """Sets the learning rate by an option."""

    table: Any = None

    def hyper(self, hyper: Any, slot: Any, update: Any) -> Any:
        rates = self.table
        while not isinstance(rates, float):
            rates = rates["lr"] if isinstance(rates, dict) else rates[0]
        return {**hyper, "lr": rates}, slot


options = st.recursive(
    st.just(0.5),
    lambda inner: st.one_of(
        inner.map(lambda each: [each]),
        inner.map(lambda each: (each,)),
        inner.map(lambda each: {"lr": each}),
    ),
    max_leaves=3,
)


def _change(value: Any) -> None:
    """Change all that can be changed within a value."""
    if isinstance(value, (list, tuple)):
        _change(value[0])
    if isinstance(value, list):
        value[:] = [0.25]
    if isinstance(value, dict):
        _change(value["lr"])
        value["lr"] = 0.25


@given(table=options)
def test_an_option_is_what_it_was_when_the_transform_was_made(table: Any) -> None:
    """Lists and dicts that a transform was given may change: its options do not."""
    given_table = copy.deepcopy(table)
    setup = _Rates(given_table)
    state = create(af.World.single(device="cpu"), setup)
    _change(given_table)
    assert setup.table == table
    assert state.lrs == (0.5,)
