# SPDX-License-Identifier: Apache-2.0
"""Trainings of models that are split, by accelfn and by torch alone."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import attrs
import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import accelfn as af
from tests.internals import fold_axes
from tests.laws.split_models import LOSSES, OPTIMIZERS, Net, Run
from tests.strategies import tensors

UPDATES = 3


@attrs.frozen
class Training:
    """A training of a few updates; what it saves half-way is loaded again."""

    run: Run
    wrap: object
    axes: Mapping[str, int]
    folder: str

    def __call__(self, world: af.World) -> list[Any]:
        """Train; return the state's tensors after each update, and metrics."""
        state, seen = self.run.state(world, self.wrap), list[Any]()
        step = af.make_step(LOSSES[self.run.loss])
        for batch in self.run.batches(state, UPDATES):
            state, metrics = step(state, batch)
            seen += [tensors(state), metrics.all_reduce_mean(world)]
        place = Path(self.folder, f"of-{type(world.group).__name__}")
        af.save(state, place)
        loaded = af.load(self.run.state(world, self.wrap), place)
        held_out = af.evaluate(loaded, self.run.data(), LOSSES[self.run.loss])
        return [*seen, tensors(loaded), held_out]


def by_hand(world: af.World, run: Run) -> dict[str, torch.Tensor]:
    """Train with torch's fully_shard and optimizer alone, as its tutorial does.

    Each rank has as many samples of a batch, so the mean over ranks is that over samples.
    """
    torch.manual_seed(run.seed)
    net = Net(run.dtype, in_list=run.in_list)
    values = run.state(af.World()).params
    net.load_state_dict({**net.state_dict(), **values})
    whole = {param for param in net.parameters() if not param.ndim}
    mesh = fold_axes(world).mesh
    for unit in net.blocks:
        fully_shard(unit, mesh=mesh)
    fully_shard(net, mesh=mesh, ignored_params=whole)
    optimizer = OPTIMIZERS[run.optimizer](
        [(n, p) for n, p in net.named_parameters() if p.requires_grad]
    )
    for batch in run.batches(run.state(af.World()), UPDATES):
        share = [value.tensor_split(world.size)[world.rank] for value in batch.value]
        LOSSES["mean"](net, share).backward()
        for param in whole:
            param.grad = af.all_reduce(param.grad, world, op="mean")
        optimizer.step()
        optimizer.zero_grad()
    return {
        name: getattr(param, "full_tensor", lambda param=param: param)().detach()
        for name, param in net.named_parameters()
    }


def swaps(world: af.World) -> int:
    """Return how many all-to-all calls a step of a model of two layers makes."""
    state = af.TrainState.create(
        model=lambda: torch.nn.ModuleList([torch.nn.Linear(2, 2) for _ in "ab"]),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        setup=af.wrap_fsdp(),
        world=world,
    )
    step = af.make_step(lambda model, batch: model[1](model[0](batch)).sum())
    state, _ = step(state, torch.ones(1, 2))
    with pytest.MonkeyPatch.context() as patch:
        counted = mock.Mock(wraps=dist.all_to_all_single)
        patch.setattr(dist, "all_to_all_single", counted)
        step(state, torch.ones(1, 2))
    return counted.call_count
