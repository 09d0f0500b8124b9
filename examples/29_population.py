# SPDX-License-Identifier: Apache-2.0
"""One idea more: many states at once. A population of runs finds its learning rate.

Every few epochs the worst run continues as a copy of the best, momentum and all, at half or
twice its learning rate (population-based training, Jaderberg et al. 2017). All ranks share
the batches of each run, and measure it together on held-out samples.
"""

from functools import partial

import torch
from torch import Tensor, nn

import accelfn as af

RATES, MOMENTUM = (0.0001, 0.0003, 0.001, 0.003), 0.9  # all of them too small
NUM_SAMPLES, BATCH, EPOCHS = 451, 64, 2  # the last batch of an epoch has 3


def samples(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return points of a plane, and the heights of a hilly land there."""
    points = torch.randn(count, 2, generator=torch.Generator().manual_seed(seed))
    return points, (2 * points).sin().sum(1, keepdim=True)


def net() -> nn.Module:
    """Return three layers."""
    hidden = nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh()
    return nn.Sequential(*hidden, nn.Linear(32, 1))


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean squared error."""
    return (model(batch[0]) - batch[1]).square().mean()


step = af.make_step(loss_fn)


@af.transform
class Rate:
    """Train at a learning rate."""

    value: float

    def hyper(self, *_: object) -> tuple[dict[str, float], None]:
        """Return the rate of the next update; it replaces the optimizer's."""
        return {"lr": self.value}, None


def with_rate(state: af.TrainState, rate: float) -> af.TrainState:
    """Return a state that trains at another learning rate."""
    return state.with_setup(af.chain(af.shard_data(), af.wrap_ddp(), Rate(rate)))


def train_until(state: af.TrainState, epoch: int) -> af.TrainState:
    """Return the state after that many epochs."""
    for batch in af.batches(state, until_epoch=epoch):
        state, _ = step(state, batch)
    return state


def copy_best(best: af.TrainState, worst: af.TrainState) -> af.TrainState:
    """Return a copy of the best member that replaces the worst."""
    with af.fork_rng(worst, "explore", shared=True):
        rate = best.lrs[0] * (2.0 if torch.rand(()) < 0.5 else 0.5)
    return with_rate(best.copy().with_name(worst.name).with_seed(worst.seed), rate)


def train(
    world: af.World, rounds: int = 12, *, exploits: bool = True
) -> dict[str, dict[str, Tensor]]:
    """Return the parameters of each member."""
    first = af.TrainState.create(
        model=net,
        optimizer=partial(torch.optim.SGD, lr=0.1, momentum=MOMENTUM),
        data=af.Data(samples(NUM_SAMPLES), global_batch_size=BATCH, shuffle=True),
        world=world,
    )
    members = [
        with_rate(first.copy().with_name(f"member {seed}").with_seed(seed), rate)
        for seed, rate in enumerate(RATES)
    ]
    held_out = af.Data(samples(203, seed=1), global_batch_size=BATCH)
    for number in range(1, rounds + 1):
        members = [train_until(member, EPOCHS * number) for member in members]
        losses = [af.evaluate(each, held_out, loss_fn)["loss"] for each in members]
        best, worst = (losses.index(pick(losses)) for pick in (min, max))
        if exploits:
            members[worst] = copy_best(members[best], members[worst])
        rates = ", ".join(f"{member.lrs[0]:.4f}" for member in members)
        af.print_once(world, f"{number}: best loss {losses[best]:.3f}, rates {rates}")
    return {member.name: af.full_params(member) for member in members}


if __name__ == "__main__":
    with af.World.from_env(device="cpu") as world:
        train(world)
        train(world, exploits=False)
