# SPDX-License-Identifier: Apache-2.0
"""One idea more: a batch too big for the memory is taken in micro-batches.

Four parts, one update: it trains what the whole batch trains, up to the rounding of the
precision that `autocast` chooses. `clip_grad_norm` bounds the gradient of the whole.
"""

from functools import partial

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset, random_split

import accelfn as af

EPOCHS = 10


def setup(num_micro_batches: int, precision: af.Transform | None) -> af.Transform:
    """Return the setup; `chain` leaves None out."""
    return af.chain(
        af.shard_data(),
        af.wrap_ddp(),
        precision,
        af.accumulate(num_micro_batches=num_micro_batches),
        af.clip_grad_norm(1.0),
    )


def digits() -> tuple[af.Data, af.Data]:
    """Return 1,437 images to train on, and 360 that are held out."""
    images, labels = map(torch.from_numpy, load_digits(return_X_y=True))
    dataset = TensorDataset((images / 16).float().reshape(-1, 1, 8, 8), labels)
    train, test = random_split(dataset, [1437, 360], torch.Generator().manual_seed(0))
    return af.Data(train, global_batch_size=256, shuffle=True), af.Data(
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


def train(world: af.World, setup: af.Transform) -> tuple[list[float], float]:
    """Return the loss of each update, and the accuracy on held-out images."""
    data, held_out = digits()
    optimizer = partial(torch.optim.AdamW, lr=0.02)
    state = af.TrainState.create(
        model=net, optimizer=optimizer, data=data, setup=setup, world=world
    )
    step = af.make_step(loss_fn)
    losses: list[float] = []
    for batch in af.batches(state, until_epoch=EPOCHS):
        state, metrics = step(state, batch)
        losses.append(metrics.all_reduce_mean(world)["loss"])
    return losses, af.evaluate(state, held_out, loss_fn)["accuracy"]


if __name__ == "__main__":
    with af.World.from_env(device="cpu") as world:
        af.print_once(world, setup(4, af.autocast("bf16")))
        for precision in None, af.autocast("bf16"):
            whole, _ = train(world, setup(1, precision))
            parts, accuracy = train(world, setup(4, precision))
            worst = max(abs(a - b) for a, b in zip(whole, parts, strict=True))
            text = f"1 and 4 micro-batches differ by {worst:.0e}, {accuracy:.1%} right"
            af.print_once(world, f"{precision or 'float32'}: {text}")
