# SPDX-License-Identifier: Apache-2.0
"""One idea more: two states, a loss each, one step that updates both, and one checkpoint.

A generator learns a tilted ring of points from a critic that learns to tell its points from
true ones (Goodfellow et al. 2014, with the penalty of Mescheder et al. 2018). A store saves
both states as one, so a run that is killed resumes with a pair of the same moment.
"""

from functools import partial
from math import tau

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

import accelfn as af

NUM_POINTS, BATCH = 4099, 128  # the last batch of an epoch has 3
TILT = torch.tensor([[1.0, 0.0], [0.8, 0.6]])
RATE, BETAS, MEMORY, PENALTY = 0.004, (0.5, 0.99), 0.99, 0.1
FOLDER = "gan-checkpoints"  # delete it to begin anew
Pair = dict[str, af.TrainState]
Noisy = tuple[list[Tensor], Tensor]


def ring(count: int) -> Tensor:
    """Return points of a noisy ring of radius 1, stretched along a diagonal."""
    draw = torch.Generator().manual_seed(0)
    angle = tau * torch.rand(count, generator=draw)
    points = torch.stack([angle.cos(), angle.sin()], 1)
    return (points + 0.05 * torch.randn(count, 2, generator=draw)) @ TILT.T


def net(num_in: int, num_out: int) -> nn.Module:
    """Return three layers."""
    hidden = nn.Linear(num_in, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU()
    return nn.Sequential(*hidden, nn.Linear(64, num_out))


def critic_loss(critic: nn.Module, batch: Noisy, generator: nn.Module) -> Tensor:
    """Return how badly the critic tells true points from made ones."""
    (true,), noise = batch
    true = true.requires_grad_()
    made, score = generator(noise), critic(true)
    (slope,) = torch.autograd.grad(score.sum(), true, create_graph=True)
    loss = softplus(critic(made)) + softplus(-score)
    return (loss + PENALTY * slope.square().sum(1, keepdim=True)).mean()


def generator_loss(generator: nn.Module, batch: Noisy, critic: nn.Module) -> Tensor:
    """Return how well the critic, which stands still, knows the made points."""
    return softplus(-critic(generator(batch[1]))).mean()


critic_step, generator_step = map(af.make_step, (critic_loss, generator_loss))


def gan_step(states: Pair, batch: af.Batch) -> Pair:
    """Update the critic, then the generator; each sees the other as it is, frozen."""
    generator, critic = states["generator"], states["critic"]
    with af.fork_rng(critic, "noise", shared=True):  # the same on any number of ranks
        noise = torch.randn(2, NUM_POINTS, 2)[:, batch.indices]
    frozen = af.snapshot_model(generator, at="train")
    critic, _ = critic_step(critic, batch.zip(noise[0]), frozen)
    frozen = af.snapshot_model(critic, at="train")
    generator, _ = generator_step(generator, batch.zip(noise[1]), frozen)
    return {"generator": generator, "critic": critic}


def train(world: af.World, epochs: int = 40) -> Tensor:
    """Return points that the generator makes at the end, at its average."""
    adam = partial(torch.optim.Adam, lr=RATE, betas=BETAS)
    setup = af.chain(af.shard_data(), af.wrap_ddp(), af.ema(MEMORY))
    create = partial(af.TrainState.create, optimizer=adam, setup=setup, world=world)
    data = af.Data((ring(NUM_POINTS),), global_batch_size=BATCH, shuffle=True)
    states = {
        "generator": create(model=partial(net, 2, 2), name="generator"),
        "critic": create(model=partial(net, 2, 1), data=data, name="critic"),
    }
    with af.CheckpointStore(FOLDER, every=320) as store:
        states = store.restore(states)
        for batch in af.batches(states["critic"], until_epoch=epochs):
            states = gan_step(states, batch)
            if store.due(states):
                store.save(states)
    with af.fork_rng(states["generator"], "look", shared=True):
        return af.snapshot_model(states["generator"], at="eval")(torch.randn(4096, 2))


if __name__ == "__main__":
    with af.World.from_env(device="cpu") as world:
        for name, points in ("true", ring(4096)), ("made", train(world)):
            radius = torch.linalg.solve(TILT, points.T).norm(dim=0)
            numbers = *points.mean(0), *points.T.cov().flatten(), radius.std()
            text = " ".join(f"{number:6.3f}" for number in numbers)
            af.print_once(world, f"{name}: mean, covariance, spread of radius {text}")
