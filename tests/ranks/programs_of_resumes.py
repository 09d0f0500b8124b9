# SPDX-License-Identifier: Apache-2.0
"""Runs that are cut, and go on with an engine of their own."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import accelfn as af

UPDATES = 3


class Crossed(nn.Module):
    """A model whose gradients come in another order than its parameters were made."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first = nn.Linear(31, 3), nn.Linear(7, 31)
        self.middle = nn.Linear(31, 31)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.first(batch).tanh()).tanh())


def fresh(world: af.World, options: dict[str, Any]) -> af.TrainState:
    data = torch.randn(96, 7, generator=torch.Generator().manual_seed(0))
    return af.TrainState.create(
        model=Crossed,
        optimizer=partial(torch.optim.AdamW, lr=0.1),
        data=af.Data(data, global_batch_size=24),
        setup=af.chain(af.shard_data(), af.wrap_ddp(**options)),
        world=world,
    )


def cut_and_whole(world, folder, options) -> list[list[str]]:
    """Return the digests of a run without a cut, and with one after each update."""
    step = af.make_step(lambda model, batch: model(batch).square().mean())

    def trained(state: af.TrainState, until: int) -> af.TrainState:
        for batch in af.batches(state):
            if state.step == until:
                break
            state, _ = step(state, batch)
        return state

    found: list[list[str]] = []
    for cut in range(UPDATES):
        state = trained(fresh(world, options), cut)
        if cut:
            path = Path(folder, str(cut))
            af.save(state, path)
            state = af.load(fresh(world, options), path)
        state = trained(state, UPDATES)
        found.append(
            [p.detach().numpy().tobytes().hex() for p in state.params.values()]
        )
    return found
