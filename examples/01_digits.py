# SPDX-License-Identifier: Apache-2.0
"""Train a small network to read handwritten digits, on any number of processes.

Run it as `python 01_digits.py`, `accelfn launch --nproc 2 01_digits.py` or
`torchrun --nproc-per-node 2 01_digits.py`: the losses agree to float32 rounding.
"""

from functools import partial
from time import perf_counter

import torch
from rich import get_console, progress, table
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset, random_split

import accelfn as af

EPOCHS = 15
SETUP = af.chain(af.shard_data(), af.wrap_ddp(), af.accumulate(num_micro_batches=2))


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


def train(world: af.World, setup: af.Transform = SETUP) -> list[af.Metrics]:
    """Return what this rank saw in each update; print a table on the main rank."""
    data, held_out = digits()
    state = af.TrainState.create(
        model=net,
        optimizer=partial(torch.optim.AdamW, lr=0.02),
        schedule=af.schedules.warmup_cosine(30, EPOCHS * data.updates_per_epoch),
        data=data,
        setup=setup,
        world=world,
    )
    step = af.make_step(loss_fn)
    history: list[af.Metrics] = []
    rows = table.Table("epoch", "training loss", "held-out loss", "accuracy", "seconds")
    quiet = not (world.is_main and get_console().is_terminal)
    start = perf_counter()
    for batch in progress.track(af.batches(state, until_epoch=EPOCHS), disable=quiet):
        state, metrics = step(state, batch)
        history.append(metrics)
        if batch.ends_epoch:
            seen = sum(history[-data.updates_per_epoch :], af.Metrics())
            loss, test = (
                seen.all_reduce_mean(world),
                af.evaluate(state, held_out, loss_fn),
            )
            losses = f"{loss['loss']:.4f}", f"{test['loss']:.4f}"
            right, seconds = f"{test['accuracy']:.1%}", f"{perf_counter() - start:.1f}"
            rows.add_row(str(batch.epoch + 1), *losses, right, seconds)
    if world.is_main:
        get_console().print(rows)
    return history


if __name__ == "__main__":
    with af.World.from_env(device="cpu") as world:  # quickest for so small a net
        train(world)
