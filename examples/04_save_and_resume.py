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
from torch.utils.data import TensorDataset, random_split

import accelfn as af

EPOCHS = 3
STOP_AT = 30  # of 23 updates an epoch: in the middle of the second
CHECKPOINT = Path("digits-checkpoint")


def digits() -> tuple[af.Data, af.Data]:
    """Return 1,437 images to train on, and 360 that are held out."""
    images, labels = map(torch.from_numpy, load_digits(return_X_y=True))
    dataset = TensorDataset((images / 16).float().reshape(-1, 1, 8, 8), labels)
    train, test = random_split(dataset, [1437, 360], torch.Generator().manual_seed(0))
    return af.Data(train, batch_size=64, shuffle=True), af.Data(test, batch_size=360)


def net() -> nn.Module:
    """Return two convolutions and a linear layer."""
    convs = nn.Conv2d(1, 32, 3), nn.SiLU(), nn.Conv2d(32, 32, 3), nn.SiLU()
    return nn.Sequential(
        *convs, nn.AvgPool2d(2), nn.Flatten(), nn.Dropout(), nn.Linear(128, 10)
    )


def loss_fn(model: nn.Module, batch: list[Tensor]) -> af.Loss:
    """Return the loss of a batch as a total and its weight; accuracy goes along."""
    images, labels = batch
    logits = model(images)
    total = cross_entropy(logits, labels, reduction="sum")
    return af.Loss(total, len(labels), accuracy=(logits.argmax(1) == labels).sum())


def create(world: af.World) -> af.TrainState:
    """Return the state before the first update."""
    data, _ = digits()
    return af.TrainState.create(
        model=net,
        optimizer=partial(torch.optim.AdamW, lr=0.01),
        schedule=af.schedules.linear(EPOCHS * data.updates_per_epoch),
        data=data,
        setup=af.chain(af.shard_data(), af.wrap_ddp(), af.ema(0.9)),
        world=world,
    )


def train(state: af.TrainState, *, until: int) -> af.TrainState:
    """Return the state after update number `until`, or after the last epoch."""
    step = af.make_step(loss_fn)
    for batch in af.batches(state, epochs=EPOCHS):
        if state.step == until:
            break
        state, _ = step(state, batch)
    return state


if __name__ == "__main__":
    with af.World.from_env(device="cpu") as world:
        whole = train(create(world), until=EPOCHS * 23)

        if world.is_main:
            shutil.rmtree(CHECKPOINT, ignore_errors=True)  # of the last time
        stopped = train(create(world), until=STOP_AT)
        af.save(stopped, CHECKPOINT)
        af.print_once(world, "stopped:", stopped)

        resumed = train(af.load(create(world), CHECKPOINT), until=EPOCHS * 23)
        same = all(
            torch.equal(resumed.params[n], whole.params[n]) for n in whole.params
        )
        af.print_once(world, "resumed:", resumed)
        af.print_once(world, "whole:  ", whole)
        af.print_once(world, "the same bits:", same)
