# SPDX-License-Identifier: Apache-2.0
"""A training whose ranks come and go, for the laws that compare it with saved and loaded ones."""

from collections.abc import Callable
from functools import partial
from typing import Any

import attrs
import torch
from torch import nn

import accelfn as af
from accelfn.testing import simulate
from tests.strategies import differences, tensors

Told = tuple[int, int]
"""After how many updates ranks met, and how many they were then."""
N = 22
RATES = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.5),
}


def loss_fn(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return a mean squared error."""
    inputs, targets = batch
    return (model(inputs) - targets).square().mean()


@attrs.frozen(kw_only=True)
class Training:
    """A training, and after how many updates its ranks have averaged."""

    setup: Any
    every: int
    updates: int
    optimizer: str = "sgd"
    batch_size: int = 4

    def state(self, world: af.World | None) -> af.TrainState:
        """Return the state before the first update."""
        return af.TrainState.create(
            model=lambda: nn.Linear(1, 2, dtype=torch.float64),
            optimizer=RATES[self.optimizer],
            data=af.Data(
                (
                    torch.arange(N, dtype=torch.float64).reshape(N, 1) / N,
                    torch.randn(
                        N,
                        2,
                        dtype=torch.float64,
                        generator=torch.Generator().manual_seed(1),
                    ),
                ),
                global_batch_size=self.batch_size,
                shuffle=True,
            ),
            setup=af.chain(af.shard_data(), self.setup),
            world=world,
        )

    def train(self, state, updates, seen=lambda _step, _ids: None) -> af.TrainState:
        """Return the state after some updates; `seen` is told of the samples of each."""
        step = af.make_step(loss_fn)
        batches = iter(af.batches(state))
        for _ in range(updates):
            batch = next(batches)
            at = state.step
            state, _ = step(state, batch)
            seen(at, batch.indices[~batch.filler].tolist())
        return state


def until(training: Training, state: af.TrainState) -> int:
    """Return how many updates are left until ranks have averaged, or all is done."""
    return min(training.every, training.updates - state.step)


def elastic(
    world: af.World,
    training: Training,
    *,
    begun: Callable[[af.TrainState], af.TrainState] = lambda state: state,
    rejoined: Callable[[af.TrainState, af.TrainState], None] = lambda _kept, _new: None,
    seen: Callable[[int, list[int]], None] = lambda _step, _ids: None,
    averaged: Callable[[af.TrainState], object] = lambda _state: None,
    restore: Callable[[af.TrainState], af.TrainState] | None = None,
) -> tuple[dict[str, torch.Tensor], list[Told]]:
    """Train as the docs say; return what is trained, and when ranks met anew."""
    regroup = partial(af.regroup, restore=restore)
    kept = regroup(begun(training.state(world)))
    told = [(kept.step, kept.world.size)]
    while kept.step < training.updates:
        before = kept.world
        try:
            state = training.train(kept.copy(), until(training, kept), seen)
            averaged(state)
            kept = regroup(state)
        except af.errors.PeerFailedError:
            old, kept = kept, regroup(kept)
            rejoined(old, kept)
        if kept.world is not before:
            told.append((kept.step, kept.world.size))
    return tensors(af.finalize(kept)), told


def in_turns(training, stages, folder) -> tuple[dict[str, torch.Tensor], ...]:
    """Return what is trained by so many ranks up to so many updates, saved and loaded between."""
    for i, (start, size) in enumerate(stages):
        is_last = i + 1 == len(stages)
        end = training.updates if is_last else stages[i + 1][0]

        def stage(world, start=start, end=end, is_last=is_last):
            state = training.state(world)
            if start:
                state = af.load(state, f"{folder}/{start}")
            state = training.train(state, end - start)
            if not is_last:
                af.save(state, f"{folder}/{end}")
            return tensors(af.finalize(state))

        ends = simulate(size, stage).results
    return ends


def as_saved(training, folder, kept, new) -> list[str]:
    """Return where a state that was regrouped differs from what its ranks had saved and load."""
    definition = attrs.evolve(kept.definition, world=new.world)
    af.save(attrs.evolve(kept, definition=definition), folder)
    return differences(
        tensors(af.load(training.state(new.world), folder)), tensors(new)
    )
