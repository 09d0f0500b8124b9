# SPDX-License-Identifier: Apache-2.0
"""Train small models on simulated ranks, to record the data for the pictures."""

from collections.abc import Mapping
from functools import partial

import torch
from torch import nn

import accelfn as af
from accelfn.testing import Entry, Run, simulate

UPDATE = 1
"""The update that is drawn: the second, for what is done once is done in the first."""
SAMPLES = 16


def run(setup: af.chain, *, ranks: int, axes: Mapping[str, int] | None = None) -> Run:
    """Train for two updates; each rank returns the samples of its micro-batches."""
    return simulate(ranks, partial(_program, setup=setup), axes=axes)


def collectives(found: Run) -> list[Entry]:
    """Return what ranks did together in the update that is drawn."""
    return [entry for entry in found.log if entry.step == UPDATE]


def _program(world: af.World, setup: af.chain) -> list[list[int]]:
    seen: list[list[int]] = []

    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        seen.append(batch.long().flatten().tolist())
        return model(batch.expand(-1, 64)).square().mean()

    state = af.TrainState.create(
        model=lambda: nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)),
        optimizer=partial(torch.optim.SGD, lr=0.01),
        data=af.Data(
            torch.arange(2.0 * SAMPLES).reshape(-1, 1), global_batch_size=SAMPLES
        ),
        setup=setup,
        world=world,
    )
    step = af.make_step(loss_fn)
    for batch in af.batches(state, until_epoch=1):
        if state.step == UPDATE:
            seen.clear()
        state, _ = step(state, batch)
    return seen
