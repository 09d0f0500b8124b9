# SPDX-License-Identifier: Apache-2.0
"""Programs that look for a batch size; each takes a world and plain data."""

import torch

import accelfn as af
from tests.laws.test_batch_size import train
from tests.strategies import tensors


def search(
    world: af.World, fits: list[int], start: int, place: str
) -> tuple[list[int], dict[str, torch.Tensor]]:
    """Return what was tried, and the state that was found, which goes on once."""
    tried = []

    def fn(batch_size: int, inner: af.World) -> af.TrainState:
        tried.append(batch_size)
        return train(batch_size, inner, batch_size > fits[world.rank], place)

    state = af.find_batch_size(fn, start, world)
    step = af.make_step(lambda model, batch: model(batch[0]).square().mean())
    state, _ = step(state, next(iter(af.batches(state))))
    af.barrier(world)
    return tried, tensors(state)


def fail_on_one(world: af.World) -> None:
    """Raise something else on one rank, while the other waits for it."""

    def fn(_: int, inner: af.World) -> None:
        if world.rank == 1:
            msg = "a bug"
            raise ValueError(msg)
        af.barrier(inner)

    af.find_batch_size(fn, 8, world)
