# SPDX-License-Identifier: Apache-2.0
"""A small training whose traffic is foreseen, and then measured on a cable."""

import time
from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import accelfn as af
from accelfn.testing import Link, simulate
from tests.hosts import AT_ONCE, sent_by, settled

WIDTH = 64
LINK = "link"
SETUPS = {
    "DDP": af.wrap_ddp(),
    "bf16": af.chain(af.wrap_ddp(), af.compress_grads("bf16")),
    "local_sgd(8)": af.local_sgd(sync_every=8),
    "diloco(8)": af.diloco(sync_every=8),
    "diloco(8), 8 bits": af.diloco(sync_every=8, bits=8),
}
UPDATES = 8


def model() -> nn.Module:
    """Return a network of 21,450 parameters."""
    layers = [each for _ in range(5) for each in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 10))


def loss_fn(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    inputs, targets = batch
    return cross_entropy(model(inputs), targets)


class Training:
    """A state and its step, to be taken some updates further at a time."""

    def __init__(self, world: af.World, setup: object) -> None:
        self.state = af.TrainState.create(
            model=model,
            optimizer=partial(torch.optim.SGD, lr=0.0),
            setup=setup,
            world=world,
        )
        self.step = af.make_step(loss_fn)
        self.batch = torch.zeros(32, WIDTH), torch.zeros(32, dtype=torch.int64)

    def train(self) -> None:
        for _ in range(UPDATES):
            self.state, _ = self.step(self.state, self.batch)


def trained(world: af.World, setup: object) -> None:
    Training(world, setup).train()


def begun(world: af.World, setup: object) -> Callable[[], object]:
    return Training(world, setup).train


def computed(begin: Callable[[af.World], Callable[[], object]]) -> list[float]:
    """Return in how many seconds a rank computes some updates, and what it sends, in nine tries.

    Two simulated ranks compute by turns, and nothing crosses a cable.

    Args:
        begin: returns what takes these updates on a rank.
    """

    def program(world: af.World) -> list[float]:
        train, taken = begin(world), list[float]()
        for _ in range(10):
            start = time.perf_counter()
            train()
            af.barrier(world)
            taken.append(time.perf_counter() - start)
        return taken[1:]

    return [seconds / 2 for seconds in simulate(2, program)[0]]


def measured(cable: str, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return seconds, and bytes that this host sent, of some updates with each setup."""
    with af.World.from_env() as world:
        runs = {name: Training(world, setup) for name, setup in SETUPS.items()}
        found = {name: {"seconds": [], "bytes": []} for name in runs}
        for turn in range(1 + rounds):
            for name, run in runs.items():
                af.barrier(world)
                settled(cable)
                # what a slowed cable lets pass at once after a pause would go uncounted
                af.all_reduce(torch.zeros(AT_ONCE // 2), world, "sum")
                before, start = sent_by(cable), time.perf_counter()
                run.train()
                seconds = time.perf_counter() - start
                settled(cable)
                if turn:  # in the first one engines are built
                    found[name]["seconds"].append(seconds)
                    found[name]["bytes"].append(sent_by(cable) - before)
        link = Link.measured(world)
        found[LINK] = {"seconds": [link.latency, link.bandwidth], "bytes": []}
        return found
