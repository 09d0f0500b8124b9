# SPDX-License-Identifier: Apache-2.0
"""One idea more: a transform of your own, as good as any that comes with the package.

`clip_spikes` saves SGD from twenty broken images that are 100 times too bright.
"""

from functools import partial

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset, random_split

import accelfn as af


@af.transform
class clip_spikes:
    """Hold a gradient's norm to `factor` times its running mean, kept in the slot."""

    factor: float = 2.0

    def init(self, state: af.TrainState) -> Tensor:
        """Return the first slot: no norm is usual yet."""
        return torch.zeros((), device=state.world.device)

    def grads(
        self, grads: af.Grads, slot: Tensor, update: af.Update
    ) -> tuple[af.Grads, Tensor]:
        """Return the gradients that go on to the optimizer, and the next slot."""
        norm = torch.nn.utils.get_total_norm(grads.tensors.values())
        usual = torch.where(slot > 0, slot, norm)
        scale = (self.factor * usual / norm).clamp(max=1)
        return grads.map(lambda g: scale * g), 0.9 * usual + 0.1 * scale * norm


def digits() -> tuple[af.Data, af.Data]:
    """Return 1,437 images to train on, and 360 that are held out."""
    images, labels = map(torch.from_numpy, load_digits(return_X_y=True))
    dataset = TensorDataset((images / 16).float().reshape(-1, 1, 8, 8), labels)
    train, test = random_split(dataset, [1437, 360], torch.Generator().manual_seed(0))
    dataset.tensors[0][train.indices[:20]] *= 100  # broken
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


def train(world: af.World, *own: af.Transform) -> None:
    """Train with transforms of our own, and print how it went."""
    data, held_out = digits()
    setup = af.chain(af.shard_data(), af.wrap_ddp(), *own)
    optimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    state = af.TrainState.create(
        model=net, optimizer=optimizer, data=data, setup=setup, world=world
    )
    step = af.make_step(loss_fn)
    for batch in af.batches(state, until_epoch=15):
        state, _ = step(state, batch)
    accuracy = af.evaluate(state, held_out, loss_fn)["accuracy"]
    af.print_once(world, f"accuracy {accuracy:.1%} with {own}")


if __name__ == "__main__":
    with af.World.from_env(device="cpu") as world:
        train(world)
        train(world, clip_spikes())
        train(world, clip_spikes(1.5), af.ema(0.98))
