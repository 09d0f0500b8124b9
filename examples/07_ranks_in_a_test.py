# SPDX-License-Identifier: Apache-2.0
"""One idea more: ranks in a test. Four ranks in this process find the bug that one cannot.

`GradNoise` looks right, and trains on one process; its noise differs from rank to rank.
"""

from functools import partial

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import accelfn as af
from accelfn.testing import LawError, check_transform, simulate


@af.transform
class GradNoise:
    """Add noise to the gradients, seeded by the update (and, alas, by the rank)."""

    scale: float = 0.01

    def grads(
        self, grads: af.Grads, slot: None, update: af.Update
    ) -> tuple[af.Grads, None]:
        """Return the gradients with noise on them."""
        seed = 4 * update.state.step + update.world.rank
        generator = torch.Generator().manual_seed(seed)
        noise = partial(torch.randn, generator=generator)
        return grads.map(lambda grad: grad + self.scale * noise(grad.shape)), slot


@af.transform
class SharedNoise:
    """Add noise from torch's own generator: in `grads`, it is the same on all ranks."""

    scale: float = 0.01

    def grads(
        self, grads: af.Grads, slot: None, update: af.Update
    ) -> tuple[af.Grads, None]:
        """Return the gradients with noise on them."""
        return grads.map(lambda grad: grad + self.scale * torch.randn_like(grad)), slot


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean loss of a batch."""
    images, labels = batch
    return cross_entropy(model(images), labels)


def train(world: af.World, *own: af.Transform) -> list[float]:
    """Take twenty updates on the digits, and return their losses over all ranks."""
    images, labels = map(torch.from_numpy, load_digits(return_X_y=True))
    state = af.TrainState.create(
        model=lambda: nn.Linear(64, 10, dtype=torch.float64),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        data=af.Data((images / 16, labels), global_batch_size=90, shuffle=True),
        setup=af.chain(af.shard_data(), af.wrap_ddp(), *own),
        world=world,
    )
    step, losses = af.make_step(loss_fn), []
    for batch in af.batches(state, until_epoch=1):
        state, metrics = step(state, batch)
        losses.append(metrics.all_reduce_mean(world)["loss"])
    return losses


if __name__ == "__main__":
    (alone,), ranks = simulate(1, train), simulate(4, train)
    apart = max(abs(one - two) for one, two in zip(alone, ranks[0], strict=True))
    print(
        f"one rank and four: losses at most {apart:.0e} apart, {len(ranks.log)} collectives"
    )
    for transform in (SharedNoise(), GradNoise()):
        try:
            check_transform(transform, sizes=[2])
            print(f"{transform} keeps the laws")
        except LawError as error:
            print(error)
