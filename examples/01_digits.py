# SPDX-License-Identifier: Apache-2.0
"""Step 1: train a small network to read handwritten digits, on any number of processes.

    python examples/01_digits.py
    accelfn launch --nproc 2 examples/01_digits.py
    torchrun --nproc-per-node 2 examples/01_digits.py

All three take the same updates: their losses agree to float32 rounding.
"""

import sys
import time
from functools import partial

import rich
import torch
import torch.nn.functional as F
from rich.progress import track
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

import accelfn as af

EPOCHS = 12
SETUP = af.chain(
    af.shard_data(),
    af.wrap_ddp(),
    af.accumulate(num_micro_batches=2),
)


def digits() -> tuple[af.Data, af.Data]:
    """Return 1,437 images of 8 x 8 pixels to train on, and 360 that are held out."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype("float32").reshape(-1, 1, 8, 8)
    parts = train_test_split(images, labels, test_size=360, random_state=0)
    x, held_out_x, y, held_out_y = map(torch.from_numpy, parts)
    held_out = af.Data((held_out_x, held_out_y), batch_size=360)
    return af.Data((x, y), batch_size=64, shuffle=True), held_out


def net() -> nn.Module:
    """Return two convolutions and a linear layer."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * 4 * 4, 10),
    )  # fmt: skip


def loss_fn(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """Return the mean loss over the batch; `model` is the plain module above."""
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def measure(model: nn.Module, batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return what is measured on held-out images, as means over the batch."""
    images, labels = batch
    logits = model(images)
    right = (logits.argmax(dim=1) == labels).float()
    return {"loss": F.cross_entropy(logits, labels), "accuracy": right.mean()}


def train(
    world: af.World, setup: af.Transform = SETUP, epochs: int = EPOCHS
) -> tuple[Table, list[af.Metrics]]:
    """Return a table with a row an epoch, and what this rank saw at each update."""
    data, held_out = digits()
    num_updates = epochs * data.updates_per_epoch
    state = af.TrainState.create(
        model=net,
        optimizer=partial(torch.optim.AdamW, lr=5e-3),
        schedule=af.schedules.warmup_cosine(num_updates // 10, num_updates),
        data=data,
        setup=setup,
        world=world,
    )
    step = af.make_step(loss_fn)
    table = Table("epoch", "training loss", "held-out loss", "accuracy", "seconds")
    history: list[af.Metrics] = []
    epoch, start = af.Metrics({}), time.perf_counter()
    quiet = not (world.is_main and sys.stdout.isatty())
    for batch in track(af.batches(state, epochs=epochs), "training", disable=quiet):
        state, metrics = step(state, batch)
        history.append(metrics)
        epoch += metrics
        if batch.ends_epoch:
            loss, seen = af.mean(epoch, world)["loss"], af.evaluate(state, held_out, measure)
            seconds = time.perf_counter() - start
            table.add_row(f"{batch.epoch+1}", f"{loss:.4f}", f"{seen['loss']:.4f}", f"{seen['accuracy']:.1%}", f"{seconds:.1f}")
            epoch = af.Metrics({})
    return table, history


if __name__ == "__main__":
    with af.World.from_env(device="cpu") as world:
        table, _ = train(world)
        if world.is_main:
            rich.print(table)
