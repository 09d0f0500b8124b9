# SPDX-License-Identifier: Apache-2.0
"""The field `module`: what transforms make of the engine's own module."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import accelfn as af
from accelfn.testing import simulate


def trained(setup: Any, size: int) -> list[dict[str, torch.Tensor]]:
    """Return each rank's parameters and running statistics after two updates."""
    rows = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))

    def rank(world):
        state = af.TrainState.create(
            model=lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)),
            optimizer=partial(torch.optim.SGD, lr=0.1),
            data=af.Data(rows, global_batch_size=8),
            setup=af.chain(af.shard_data(), af.wrap_ddp(), setup),
            world=world,
        )
        step = af.make_step(lambda model, batch: model(batch).square().mean())
        for batch in af.batches(state, until_epoch=2):
            state, _ = step(state, batch)
        return {**state.params, **state.buffers}

    return list(simulate(size, rank))


@pytest.mark.parametrize("size", [1, 2])
def test_who_changes_modules_stands_in_any_order(size):
    """What recomputes runs again what others have made of a module, wherever it stands."""
    again, over = af.checkpoint_activations(), af.sync_batchnorm()
    one, two, plain = (
        trained(setup, size)
        for setup in (af.chain(again, over), af.chain(over, again), over)
    )
    for other in (two, plain):
        for mine, theirs in zip(one, other, strict=True):
            assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_another_module_is_refused():
    """The optimizer steps the parameters that the engine has; a copy has others."""

    @af.transform
    class Copies:
        def module(self, module, state):
            return copy.deepcopy(module)

    with pytest.raises(
        af.errors.ModelError, match=r"Copies\(\).module returned a module with other"
    ):
        trained(Copies(), 1)


def test_a_module_may_be_put_around_one():
    """What the loss is given is what the last transform returned."""
    seen: list[str] = []

    @af.transform
    class Named:
        word: str

        def module(self, module, state):
            module.register_forward_pre_hook(lambda *_: seen.append(self.word))
            return module

    trained(af.chain(Named("first", name="one"), Named("second", name="two")), 1)
    assert seen == ["first", "second"] * 2


@pytest.mark.parametrize("what", ["parameter", "buffer"])
def test_what_no_state_would_hold_is_refused(what):
    """A parameter or buffer that a transform adds would be trained, or saved, by nobody."""

    @af.transform
    class Adds:
        def module(self, module, state):
            if what == "buffer":
                module.register_buffer("extra", torch.zeros(1))
            else:
                module.extra = nn.Parameter(torch.ones(1))
            return module

    with pytest.raises(af.errors.ModelError, match=r"Adds\(\).module .*these: extra"):
        trained(Adds(), 1)
