# SPDX-License-Identifier: Apache-2.0
"""Small states to be saved, each step's with values of its own."""

from functools import cache
from pathlib import Path
from typing import Any

import attrs
import torch

import accelfn as af
from tests.strategies import Run, differences, tensors


@cache
def base() -> af.TrainState:
    return Run(n=4, batch_size=2).state()


def state_of(step: int, world: af.World | None = None) -> af.TrainState:
    """Return the state of a step, with values that no other step's has."""
    state = base() if world is None else Run(n=4, batch_size=2).state(world)
    params = {name: torch.full_like(p, step / 8) for name, p in state.params.items()}
    return attrs.evolve(state, step=step, params=params)


def to_save(step: int, world: af.World | None = None, *, joint: bool) -> Any:
    """Return the state of a step, or two states of it that are saved together."""
    if not joint:
        return state_of(step, world)
    first = state_of(step, world)
    params = {name: -param for name, param in first.params.items()}
    return {"first": first, "second": attrs.evolve(first, params=params)}


def is_of(folder: Path, step: int, *, joint: bool = False) -> bool:
    """Whether what was saved of a step is there, bitwise, and can be loaded."""
    into = {"second": base(), "first": base()} if joint else base()
    saved, loaded = to_save(step, joint=joint), af.load(into, folder)
    pairs = [(saved[n], loaded[n]) for n in saved] if joint else [(saved, loaded)]
    return all(differences(tensors(one), tensors(two)) == [] for one, two in pairs)
