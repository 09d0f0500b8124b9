# SPDX-License-Identifier: Apache-2.0
"""Small states to be saved, each step's with values of its own."""

from functools import cache
from pathlib import Path

import attrs
import torch

import accelfn as af
from tests.strategies import Run, differences, tensors


@cache
def base() -> af.TrainState:
    """Return a state before its first update."""
    return Run(n=4, batch_size=2).state()


def state_of(step: int, world: af.World | None = None) -> af.TrainState:
    """Return the state of a step, with values that no other step's has."""
    state = base() if world is None else Run(n=4, batch_size=2).state(world)
    params = {name: torch.full_like(p, step / 8) for name, p in state.params.items()}
    return attrs.evolve(state, step=step, params=params)


def is_of(folder: Path, step: int) -> bool:
    """Whether the state of a step is there, bitwise, and can be loaded."""
    loaded = af.load(base(), folder)
    return differences(tensors(state_of(step)), tensors(loaded)) == []
