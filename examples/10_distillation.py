# SPDX-License-Identifier: Apache-2.0
"""One idea more: a teacher that stands still. `af.snapshot_model` lends it, and the loss asks it.

A small student that learns what the teacher thinks of 100 images, right or wrong, reads
held-out digits better than one that learns their labels (Hinton et al. 2015).
"""

from collections.abc import Callable
from functools import partial

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Subset, TensorDataset, random_split

import accelfn as af

WARMTH = 4.0


def digits() -> tuple[TensorDataset, Subset[tuple[Tensor, ...]]]:
    """Return 1,437 images to train on, and 360 that are held out."""
    images, labels = map(torch.from_numpy, load_digits(return_X_y=True))
    dataset = TensorDataset((images / 16).float(), labels)
    train, test = random_split(dataset, [1437, 360], torch.Generator().manual_seed(0))
    return TensorDataset(*dataset[train.indices]), test


def net(width: int) -> nn.Module:
    """Return two layers of linear maps."""
    return nn.Sequential(nn.Linear(64, width), nn.SiLU(), nn.Linear(width, 10))


def loss_fn(model: nn.Module, batch: list[Tensor]) -> af.Loss:
    """Return the loss of a batch by its labels; accuracy goes along."""
    images, labels = batch
    logits = model(images)
    total = cross_entropy(logits, labels, reduction="sum")
    return af.Loss(total, len(labels), accuracy=(logits.argmax(1) == labels).sum())


def distillation_loss(
    student: nn.Module, batch: list[Tensor], teacher: nn.Module
) -> Tensor:
    """Return how far the student is from what the teacher thinks, softened."""
    wanted = (teacher(batch[0]) / WARMTH).softmax(1)
    return WARMTH**2 * cross_entropy(student(batch[0]) / WARMTH, wanted)


def train(
    state: af.TrainState,
    epochs: int,
    loss: Callable[..., Tensor | af.Loss],
    *extras: nn.Module,
) -> af.TrainState:
    """Return the state after some epochs."""
    step = af.make_step(loss)
    for batch in af.batches(state, until_epoch=epochs):
        state, _ = step(state, batch, *extras)
    return state


def compare(world: af.World) -> dict[str, float]:
    """Return the accuracy of each on held-out images."""
    known, held_out = digits()
    few = TensorDataset(*known[:100])
    create = partial(
        af.TrainState.create,
        optimizer=partial(torch.optim.AdamW, lr=0.01),
        setup=af.chain(af.shard_data(), af.wrap_ddp()),
        world=world,
    )
    all_data, few_data = (
        af.Data(each, global_batch_size=50, shuffle=True) for each in (known, few)
    )
    teacher = train(create(model=partial(net, 256), data=all_data), 10, loss_fn)
    student = create(model=partial(net, 16), data=few_data)
    states = {
        "teacher": teacher,
        "alone": train(student.copy(), 100, loss_fn),
        "taught": train(student, 100, distillation_loss, af.snapshot_model(teacher)),
    }
    test = af.Data(held_out, global_batch_size=360)
    return {n: af.evaluate(s, test, loss_fn)["accuracy"] for n, s in states.items()}


if __name__ == "__main__":
    with af.World.from_env(device="cpu") as world:
        for name, accuracy in compare(world).items():
            af.print_once(world, f"{name}: {accuracy:.1%} right")
