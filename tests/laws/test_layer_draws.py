# SPDX-License-Identifier: Apache-2.0
"""Ranks that have parts of layers draw alike where they compute the same, and apart elsewhere."""

from functools import partial
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import accelfn as af
from accelfn.testing import simulate
from tests.laws.parallel_layers import DDP, PLAN, Lying, Speech


@pytest.mark.filterwarnings("ignore::accelfn.errors.AccelfnWarning")
@pytest.mark.parametrize(
    "axes", [{"tp": 2}, {"dp_shard": 2, "tp": 2}, {"cp": 2, "tp": 2}]
)
def test_ranks_that_compute_the_same_draw_the_same(axes):
    """Ranks along "tp" where a model is evaluated; by `af.fork_rng`, all that share samples."""
    speech, lying = Speech(n=8, batch_size=4, plan=PLAN), Lying(axes, DDP)

    def fn(world: af.World) -> list[tuple[int, float]]:
        state, drawn = speech.state(world, *lying.setup(PLAN)), list[float]()

        def draws(*_: object) -> af.Loss:
            drawn.append(float(torch.rand(())))
            return af.Loss(torch.zeros(()), 1)

        af.evaluate(state, speech.data(), draws)
        with af.fork_rng(state, "noise"):
            noise = float(torch.rand(()))
        return [(world.loss.rank, drawn[-1]), (world.batch.rank, noise)]

    for each in zip(*lying.on_ranks(fn), strict=True):
        sharers, values = zip(*set(each), strict=True)
        assert len(set(sharers)) == len(set(values)) == len(values)


class Scattered(nn.Module):
    """Layers of which all ranks have the first, and each its positions of what that gives."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)
        self.drawn: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.training:
            self.drawn.append(float(torch.rand(())))
        return self.head(x + self.down(self.up(x)))


@given(
    axes=st.sampled_from([{"tp": 2}, {"tp": 4}, {"dp_shard": 2, "tp": 2}]),
    updates=st.integers(1, 3),
    seed=st.integers(0, 9),
)
def test_scattered_positions_have_draws_of_their_own(axes, updates, seed):
    """Behind what is scattered, and before any layer that is split, no two ranks draw alike."""
    words = {"first": "scattered", "up": "column", "down": "row", "head": "gathered"}
    plan = af.tensor_parallel(words, sequence=True)

    def fn(world: af.World) -> list[float]:
        drawn: list[float] = []

        def loss(net: Scattered, x: torch.Tensor) -> torch.Tensor:
            total = net(x).square().mean()
            drawn.extend(net.drawn)
            net.drawn.clear()
            return total

        state = af.TrainState.create(
            model=Scattered,
            optimizer=partial(torch.optim.SGD, lr=0.01),
            setup=af.chain(af.wrap_ddp(), plan),
            world=world,
            seed=seed,
        )
        for _ in range(updates):
            state, _ = af.make_step(loss)(state, torch.ones(1, 4, 4))
        return drawn

    found = [
        each for rank in simulate(prod(axes.values()), fn, axes=axes) for each in rank
    ]
    assert len(found) == len(set(found)) == updates * prod(axes.values())
