# SPDX-License-Identifier: Apache-2.0
"""An engine as a user would write it, from public names and `accelfn.plug` alone."""

from functools import partial
from typing import ClassVar

import pytest
import torch
from torch import nn

import accelfn as af
from accelfn.plug import LocalRunner, ReplicaBinding, build_engine, collectives
from accelfn.testing import check_transform, run_processes, simulate

INPUTS = torch.linspace(-1, 1, 28).reshape(14, 2)


class FlatRunner(LocalRunner):
    """Runs the loss on this rank, and averages all gradients at once after the pass."""

    reduces, expects_unused = True, False

    def __init__(self, module, ranks):
        super().__init__(module)
        self.lone_module = None  # a graph of the loss alone would leave out the sum
        self.params = [param for param in module.parameters() if param.requires_grad]
        self.ranks = ranks

    def forward(self, loss_fn, samples, *, sync):
        self.sync = sync
        return super().forward(loss_fn, samples, sync=sync)

    def backward(self, scalar, scale, weight):
        super().backward(scalar, scale, weight)
        if not self.sync:  # more micro-batches follow
            return None
        mean = torch.zeros((), dtype=torch.float64, device=self.ranks.device) + weight
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.params]
        used = torch.tensor([float(p.grad is not None) for p in self.params])
        flat = [*grads, used.to(self.ranks.device), mean]
        collectives.all_reduce_(flat, self.ranks, label="gradients")
        for each in flat:
            each.div_(self.ranks.size)
        for param, grad, share in zip(self.params, grads, used.tolist(), strict=True):
            param.grad = grad if share else None
        return mean


@af.transform
class wrap_flat:
    """Train copies of the model, whose gradients cross the ranks in one piece."""

    tells: ClassVar = {"draws_nothing": True}
    refuses: ClassVar = {
        "layout": "needs each parameter whole, but {other!r} splits it.",
        "steps_in_backward": "averages after the pass, but {other!r} steps in it.",
    }

    def engine(self, state):
        ranks = state.world.loss
        return build_engine(
            state, ReplicaBinding(state), lambda module, _: FlatRunner(module, ranks)
        )


def loss_fn(model, batch):
    inputs, targets = batch
    return (model(inputs) - targets).square().mean()


def train(world):
    state = af.TrainState.create(
        model=lambda: nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2)),
        optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.5),
        data=af.Data((INPUTS, INPUTS.sin()), global_batch_size=5, shuffle=True),
        setup=af.chain(
            af.shard_data(), wrap_flat(), af.accumulate(num_micro_batches=2)
        ),
        world=world,
    )
    step = af.make_step(loss_fn)
    for batch in af.batches(state, until_epoch=2):
        state, _ = step(state, batch)
    return af.full_params(state)


@pytest.fixture(scope="module")
def alone():
    return train(af.World.single(device="cpu"))


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_train_as_one_process_does(size, alone):
    """Shares and micro-batches of any sizes give one process's parameters."""
    for params in simulate(size, train):
        torch.testing.assert_close(params, alone, rtol=1e-5, atol=1e-6)


def test_processes_train_as_one_does(alone):
    """So do two real processes."""
    for params in run_processes(2, train):
        torch.testing.assert_close(params, alone, rtol=1e-5, atol=1e-6)


def test_the_laws_hold():
    """Every law of transforms holds for it."""
    check_transform(wrap_flat(), sizes=[2])
