# SPDX-License-Identifier: Apache-2.0
"""`af.fused` chooses torch's fused kernels where the choice was left open."""

from functools import partial

import pytest
import torch
from torch import nn, optim

import accelfn as af

X = torch.linspace(-1, 1, 24).reshape(8, 3)
STEP = af.make_step(lambda model, x: model(x).square().mean())


def create(optimizer, dtype=torch.float32):
    return af.TrainState.create(
        model=lambda: nn.Linear(3, 2, dtype=dtype), optimizer=optimizer
    )


FUSED = {
    "SGD": partial(optim.SGD, lr=0.1, momentum=0.5),
    "Adam": partial(optim.Adam, lr=0.1),
    "AdamW": partial(optim.AdamW, lr=0.1),
    "Adagrad": partial(optim.Adagrad, lr=0.1),
    "a class": optim.Adam,
}


@pytest.mark.parametrize("name", FUSED)
def test_it_is_torchs_fused_optimizer(name):
    """It is bitwise the optimizer with `fused=True`, and to rounding that without."""
    make = FUSED[name]
    states = [
        create(each) for each in (af.fused(make), partial(make, fused=True), make)
    ]
    for i in range(3):
        states = [STEP(state, X + i)[0] for state in states]
    fused, chosen, plain = (state.params for state in states)
    assert states[0].definition.optimizer.param_groups[0]["fused"] is True
    for param in fused:
        assert torch.equal(fused[param], chosen[param])
        torch.testing.assert_close(fused[param], plain[param])


@pytest.mark.parametrize(
    "choice", [{"fused": False}, {"foreach": True}, {"foreach": False}, {"fused": True}]
)
def test_the_users_choice_stays(choice):
    """What was chosen, either way, is left as it is."""
    group = create(af.fused(partial(optim.AdamW, **choice))).definition.optimizer
    ways = {way: group.param_groups[0][way] for way in ("fused", "foreach")}
    assert ways == {"fused": None, "foreach": None} | choice


@pytest.mark.parametrize(
    ("factory", "dtype", "why"),
    [
        (optim.RMSprop, torch.float32, "RMSprop has no fused"),
        (optim.Adam, torch.complex64, "Adam cannot be fused here: .*floating"),
        (
            lambda named: optim.Adam(list(named)),
            torch.float32,
            "cannot be fused.*keyword",
        ),
        (lambda _: None, torch.float32, "NoneType has no fused"),
    ],
)
def test_what_cannot_be_fused(factory, dtype, why):
    """An optimizer without fused kernels, or parameters that they cannot, are refused."""
    with pytest.raises(af.OptimizerError, match=why):
        create(af.fused(factory), dtype)
