# SPDX-License-Identifier: Apache-2.0
"""Gradients that a user made train as those of `value_and_grad` do."""

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

import accelfn as af
from accelfn.testing import simulate

ENGINES = {
    "none": (),
    "ddp": (af.shard_data(), af.wrap_ddp()),
    "fsdp": (af.shard_data(), af.wrap_fsdp()),
}
X = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(12, 1)


def create(world: af.World, setup: tuple[Any, ...]) -> af.TrainState:
    """Return a state in float64."""
    return af.TrainState.create(
        model=lambda: nn.Linear(1, 3, dtype=torch.float64),
        optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        setup=af.chain(*setup),
        world=world,
    )


def loss_of(model: Any, rows: torch.Tensor) -> torch.Tensor:
    """Return the mean over the rows."""
    return (model(rows) - 2 * rows).square().mean()


def by_hand(state: af.TrainState, rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return gradients of the mean over the rows, without a step of accelfn."""
    with af.borrow_model(state, gather=True) as model:
        params = {n: p.detach().requires_grad_() for n, p in model.named_parameters()}

        def call(x: torch.Tensor) -> torch.Tensor:
            return torch.func.functional_call(model, params, (x,))

        grads = torch.autograd.grad(loss_of(call, rows), tuple(params.values()))
    return dict(zip(params, grads, strict=True))


@given(
    engine=st.sampled_from(sorted(ENGINES)),
    shares=st.lists(st.integers(0, 3), min_size=1, max_size=4).filter(any),
    as_tensor=st.booleans(),
    into=st.booleans(),
)
@example(engine="none", shares=[0, 2], as_tensor=False, into=False)
@example(engine="fsdp", shares=[0, 2], as_tensor=True, into=False)
def test_gradients_made_by_hand_train_as_those_of_a_loss(
    engine, shares, as_tensor, into
):
    """They are averaged by weight; a rank without samples has a gradient of NaN and weight 0."""

    def train(world: af.World) -> dict[str, torch.Tensor]:
        state = create(world, ENGINES[engine])
        begin = sum(shares[: world.rank])
        for _ in range(2):
            mine = X[begin : begin + shares[world.rank]]
            weight = torch.tensor(len(mine)) if as_tensor else len(mine)
            grads = af.Grads(by_hand(state, mine), weight=weight)
            if into and all(shares):  # the same rows again
                compute = af.value_and_grad(loss_of)
                _, grads = compute(state, mine, into=grads, sync=False)
            state = af.apply_grads(state, af.sync_grads(state, grads))
        return af.full_params(state)

    whole = create(af.World.single(), ())
    step = af.make_step(loss_of)
    for _ in range(2):
        whole, _ = step(whole, X[: sum(shares)])
    for found in simulate(len(shares), train):
        for name, expected in whole.params.items():
            torch.testing.assert_close(found[name], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("tensors", "weight", "words"),
    [
        (
            {"kernel": torch.ones(3, 1).double()},
            1,
            "'kernel', but the state trains no parameter",
        ),
        ({"weight": torch.ones(3).double()}, 1, r"\(3,\).*\(3, 1\)"),
        ({"weight": [1.0]}, 1, "a dict from parameter names"),
        ({}, torch.ones(2), "expected a finite number"),
        ({}, -1, "expected a number of samples or tokens, 0 or more"),
    ],
    ids=["name", "shape", "list", "vector", "negative"],
)
def test_gradients_that_fit_no_parameter_are_rejected(tensors, weight, words):
    """The error comes before the update, which leaves the state as it was."""
    state = create(af.World.single(), ())
    with pytest.raises(af.errors.GradsError, match=words):
        af.apply_grads(state, af.Grads(tensors, weight=weight))
    assert state.copy().step == 0


def test_gradients_made_by_hand_are_given_away():
    """A second use is an error that says what to do."""
    state = create(af.World.single(), ())
    grads = af.Grads(by_hand(state, X))
    state = af.apply_grads(state, grads)
    with pytest.raises(af.errors.GradsError, match="These gradients were passed to"):
        af.apply_grads(state, grads)


@given(ranks=st.integers(1, 4))
def test_gradients_of_a_batch_count_its_samples(ranks: int) -> None:
    """Without a weight, shares count by their samples, and an empty share not at all."""

    def train(world: af.World, *, by_loss: bool) -> dict[str, torch.Tensor]:
        state = af.TrainState.create(
            model=lambda: nn.Linear(1, 3, dtype=torch.float64),
            optimizer=partial(torch.optim.SGD, lr=0.1),
            data=af.Data(X[:9], global_batch_size=6),
            setup=af.chain(af.shard_data(), af.wrap_ddp()),
            world=world,
        )
        step = af.make_step(loss_of)
        for batch in af.batches(state, until_epoch=1):
            if by_loss:
                state, _ = step(state, batch)
                continue
            made = af.Grads(by_hand(state, batch.value), batch=batch)
            state = af.apply_grads(state, af.sync_grads(state, made))
        return dict(af.full_params(state))

    (whole,) = simulate(1, partial(train, by_loss=True))
    for found in simulate(ranks, partial(train, by_loss=False)):
        for name, expected in whole.items():
            torch.testing.assert_close(found[name], expected, rtol=0, atol=1e-12)


def test_gradients_of_a_batch_move_the_cursor():
    """The next state is after the batch, and a batch is taken once."""
    state = af.TrainState.create(
        model=lambda: nn.Linear(1, 3, dtype=torch.float64),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        data=af.Data(X, global_batch_size=4),
    )
    batch = next(iter(af.batches(state)))
    for _ in range(2):
        made = af.Grads(by_hand(state, batch.value), batch=batch)
        if state.step:
            with pytest.raises(af.errors.BatchError, match="A step already used this"):
                af.apply_grads(state, made)
        else:
            state = af.apply_grads(state, made)
    assert state.cursor == batch.cursor


def test_gradients_made_by_hand_are_added_to_scaled_ones():
    """Under a loss scale, `into=` has the mean of both."""
    state = create(af.World.single(), (af.autocast("fp16"),))
    made = af.Grads(by_hand(state, X[:4]), weight=4)
    _, both = af.value_and_grad(loss_of)(state, X[4:], into=made)
    expected = by_hand(state, X)
    for name, grad in both.tensors.items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-2, atol=1e-2)
