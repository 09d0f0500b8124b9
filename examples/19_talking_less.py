# SPDX-License-Identifier: Apache-2.0
"""Compare seven communication methods: the bytes that each sends, and its accuracy.

Ranks are simulated, so one process counts every byte.
"""

from functools import partial

import torch
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset, random_split

import accelfn as af
from accelfn.testing import simulate

RANKS, EPOCHS = 2, 15
WAYS = {
    "DDP": af.wrap_ddp(),
    "DDP in 16 bits": af.chain(af.wrap_ddp(), af.compress_grads("bf16")),
    "local SGD": af.local_sgd(sync_every=8),
    "DiLoCo": af.diloco(sync_every=8),
    "DiLoCo in 8 bits": af.diloco(sync_every=8, bits=8),
    "DiLoCo in 4 bits": af.diloco(sync_every=8, bits=4),
    "DiLoCo, delayed": af.diloco(sync_every=8, fragments=2, delay=1, mix=0.5),
}


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


def train(world: af.World, way: af.Transform, seed: int = 0) -> dict[str, float]:
    """Train with a communication method; return loss and accuracy on the held-out images."""
    data, held_out = digits()
    state = af.TrainState.create(
        model=net,
        optimizer=partial(torch.optim.AdamW, lr=0.01),
        schedule=af.schedules.warmup_cosine(30, EPOCHS * data.updates_per_epoch),
        data=data,
        setup=af.chain(af.shard_data(), way),
        seed=seed,
        world=world,
    )
    step = af.make_step(loss_fn)
    for batch in af.batches(state, until_epoch=EPOCHS):
        state, _ = step(state, batch)
    return af.evaluate(af.finalize(state), held_out, loss_fn)


def main(ranks: int = RANKS) -> None:
    """Print a row for each method."""
    table = Table("method", "MB per rank", "held-out loss", "accuracy")
    for says, way in WAYS.items():
        run = simulate(ranks, partial(train, way=way))
        sent = sum(each.num_bytes for each in run.log if each.step is not None)
        loss, right = run[0]["loss"], run[0]["accuracy"]
        table.add_row(says, f"{sent / 1e6:.1f}", f"{loss:.3f}", f"{right:.1%}")
    Console().print(table)


if __name__ == "__main__":
    main()
