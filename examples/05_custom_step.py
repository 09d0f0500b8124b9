# SPDX-License-Identifier: Apache-2.0
"""One idea more: a step of your own, of the two halves that `make_step` is made of.

Sharpness-aware minimisation (Foret et al. 2021) takes the gradient not where it stands
but a little uphill, so that it ends in a flat valley: two gradients, one update. With
200 images to learn from, that is worth two points of accuracy.
"""

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset, random_split

import accelfn as af

RADIUS = 0.5
Step: TypeAlias = Callable[..., tuple[af.TrainState, af.Metrics]]


def digits() -> tuple[af.Data, af.Data]:
    """Return 200 images to train on, and 1,597 that are held out."""
    images, labels = map(torch.from_numpy, load_digits(return_X_y=True))
    dataset = TensorDataset((images / 16).float().reshape(-1, 1, 8, 8), labels)
    train, test = random_split(dataset, [200, 1597], torch.Generator().manual_seed(0))
    return af.Data(train, global_batch_size=64, shuffle=True), af.Data(
        test, global_batch_size=512
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


gradient = af.value_and_grad(loss_fn)


def sam_step(state: af.TrainState, batch: af.Batch) -> tuple[af.TrainState, af.Metrics]:
    """Take one update, with the gradient that is found RADIUS further up the slope."""
    metrics, grads = gradient(state, batch)
    norm = nn.utils.get_total_norm(grads.tensors.values())
    uphill = {n: state.params[n] + RADIUS / norm * g for n, g in grads.tensors.items()}
    _, grads = gradient(state.with_params(uphill), batch)
    return af.apply_grads(state, grads), metrics


def train(world: af.World, step: Step) -> str:
    """Return what is measured on held-out images at the end."""
    data, held_out = digits()
    state = af.TrainState.create(
        model=net,
        optimizer=partial(torch.optim.AdamW, lr=0.02),
        schedule=af.schedules.linear(40 * data.updates_per_epoch),
        data=data,
        setup=af.chain(af.shard_data(), af.wrap_ddp()),
        world=world,
    )
    for batch in af.batches(state, until_epoch=40):
        state, _ = step(state, batch)
    test = af.evaluate(state, held_out, loss_fn)
    return f"held-out loss {test['loss']:.3f}, accuracy {test['accuracy']:.1%}"


if __name__ == "__main__":
    with af.World.from_env(device="cpu") as world:
        af.print_once(world, "plain step:", train(world, af.make_step(loss_fn)))
        af.print_once(world, "SAM's step:", train(world, sam_step))
