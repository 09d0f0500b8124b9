# SPDX-License-Identifier: Apache-2.0
"""One idea more: a run that stops in mid-epoch, and goes on as if it never had.

Order, dropout and schedule are functions of the state, so the resumed run ends with the
very bits of the uninterrupted one. The checkpoint is left in `digits-checkpoint/`.
"""

import shutil
from functools import partial
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import accelfn as af

FOLDER = Path("digits-checkpoint")


def digits() -> af.Data:
    """Return 1,797 images, 29 updates an epoch."""
    images, labels = map(torch.from_numpy, load_digits(return_X_y=True))
    images = (images / 16).float().reshape(-1, 1, 8, 8)
    return af.Data((images, labels), global_batch_size=64, shuffle=True)


def net() -> nn.Module:
    """Return two convolutions and a linear layer, with dropout between them."""
    convs = nn.Conv2d(1, 32, 3), nn.SiLU(), nn.Conv2d(32, 32, 3), nn.SiLU()
    last = nn.Flatten(), nn.Dropout(), nn.Linear(128, 10)
    return nn.Sequential(*convs, nn.AvgPool2d(2), *last)


def loss_fn(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """Return the mean loss of a batch."""
    images, labels = batch
    return cross_entropy(model(images), labels)


def create(world: af.World) -> af.TrainState:
    """Return the state before the first update."""
    return af.TrainState.create(
        model=net,
        optimizer=partial(torch.optim.AdamW, lr=0.01),
        schedule=af.schedules.linear(3 * 29),
        data=digits(),
        setup=af.chain(af.shard_data(), af.wrap_ddp(), af.ema(0.9)),
        world=world,
    )


def train(state: af.TrainState, *, until: int) -> af.TrainState:
    """Return the state after update number `until`; it may begin anywhere."""
    step = af.make_step(loss_fn)
    for batch in af.batches(state):
        state, _ = step(state, batch)
        if state.step == until:
            break
    return state


if __name__ == "__main__":
    with af.World.from_env(device="cpu") as world:
        whole = train(create(world), until=3 * 29)
        af.print_once(world, "whole  ", whole)

        if world.is_main:
            shutil.rmtree(FOLDER, ignore_errors=True)  # of the last time
        stopped = train(create(world), until=40)
        af.save(stopped, FOLDER)
        af.print_once(world, "stopped", stopped)

        resumed = train(af.load(create(world), FOLDER), until=3 * 29)
        af.print_once(world, "resumed", resumed)
        same = all(
            torch.equal(resumed.params[n], whole.params[n]) for n in whole.params
        )
        af.print_once(world, "resumed has the bits of whole:", same)
