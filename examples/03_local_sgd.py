# SPDX-License-Identifier: Apache-2.0
"""One idea more: ranks that train apart, and average their weights every 8 updates.

`wrap_ddp` reduces gradients in every update, `local_sgd` parameters in every eighth: over
a slow network that decides how fast a run is. Start it with `accelfn launch --nproc 2`;
a single process has nobody to talk to.
"""

from functools import partial
from time import perf_counter

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset, random_split

import accelfn as af

EPOCHS = 15


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


def num_collectives(world: af.World) -> int:
    """Return torch's count of them."""
    return world.group._get_sequence_number_for_group() if world.group else 0


def train(world: af.World, way: af.Transform) -> str:
    """Return how it went; only the setup knows which way it is."""
    data, held_out = digits()
    state = af.TrainState.create(
        model=net,
        optimizer=partial(torch.optim.AdamW, lr=0.02),
        schedule=af.schedules.warmup_cosine(30, EPOCHS * data.updates_per_epoch),
        data=data,
        setup=af.chain(af.shard_data(), way),
        world=world,
    )
    step = af.make_step(loss_fn)
    state = af.prepare_engine(state)  # here the ranks compare their models, once
    before, start = num_collectives(world), perf_counter()
    for batch in af.batches(state, until_epoch=EPOCHS):
        state, _ = step(state, batch)
    state = af.finalize(state)  # the last average, where one is owed
    calls, seconds = num_collectives(world) - before, perf_counter() - start
    accuracy = af.evaluate(state, held_out, loss_fn)["accuracy"]
    talk = f"{calls} collectives in {state.step} updates"
    return f"{talk}, {seconds:.1f} s, {accuracy:.1%} right"


if __name__ == "__main__":
    with af.World.from_env(device="cpu") as world:
        for way in af.wrap_ddp(), af.local_sgd(sync_every=8):
            af.print_once(world, f"{way}: {train(world, way)}")
