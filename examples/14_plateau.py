# SPDX-License-Identifier: Apache-2.0
"""One idea more: the learning rate falls when the held-out loss gets no better.

`af.report_metric` tells `af.reduce_lr_on_plateau` what an evaluation gave; its slot keeps it.
"""

from functools import partial

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset, random_split

import accelfn as af


def digits() -> tuple[af.Data, af.Data]:
    """Return 1,437 images to train on, and 360 that are held out."""
    images, labels = map(torch.from_numpy, load_digits(return_X_y=True))
    dataset = TensorDataset((images / 16).float().reshape(-1, 1, 8, 8), labels)
    train, test = random_split(dataset, [1437, 360], torch.Generator().manual_seed(0))
    return af.Data(train, global_batch_size=64, shuffle=True), af.Data(
        test, global_batch_size=360
    )


def net() -> nn.Module:
    """Return two convolutions and a linear layer."""
    convs = nn.Conv2d(1, 32, 3), nn.SiLU(), nn.Conv2d(32, 32, 3), nn.SiLU()
    return nn.Sequential(*convs, nn.AvgPool2d(2), nn.Flatten(), nn.Linear(128, 10))


def loss_fn(model: nn.Module, batch: list[Tensor]) -> af.Loss:
    """Return the loss of a batch as a total and its weight; accuracy goes along."""
    images, labels = batch
    logits = model(images)
    total = cross_entropy(logits, labels, reduction="sum")
    return af.Loss(total, len(labels), accuracy=(logits.argmax(1) == labels).sum())


def train(world: af.World, *setup: af.Transform) -> None:
    """Train with a rate too large to end with, and print how it went."""
    data, held_out = digits()
    state = af.TrainState.create(
        model=net,
        optimizer=partial(torch.optim.SGD, lr=0.25, momentum=0.9),
        data=data,
        setup=af.chain(af.shard_data(), af.wrap_ddp(), *setup),
        world=world,
    )
    step = af.make_step(loss_fn)
    for batch in af.batches(state, until_epoch=15):
        state, _ = step(state, batch)
        if batch.ends_epoch:
            measured = af.evaluate(state, held_out, loss_fn)
            if setup:
                before = state.lrs
                state = af.report_metric(state, measured["loss"])
                if state.lrs != before:
                    af.print_once(world, f"epoch {batch.epoch}: rate {state.lrs[0]:g}")
    af.print_once(world, f"accuracy {measured['accuracy']:.1%} with {setup}")


if __name__ == "__main__":
    with af.World.from_env(device="cpu") as world:
        train(world)
        train(world, af.reduce_lr_on_plateau(0.2, patience=1, min_lr=0.001))
