# SPDX-License-Identifier: Apache-2.0
"""Programs that the rank processes of the tests run; each takes a world and plain data."""

from typing import Any

import torch

import accelfn as af
from tests.strategies import Run, tensors

Found = dict[str, torch.Tensor]


def train(world: af.World, run: Run) -> tuple[list[Found], list[dict[str, float]]]:
    """Train; return the states after every update, and the metrics' means over ranks."""
    state = run.state(world)
    states, means = [], []
    for _ in range(run.updates):
        state, metrics = run.train(state, 1)
        states.append(tensors(state))
        means.append(metrics[0].all_reduce_mean(world))
    return states, means


def under_a_profiler(world: af.World, run: Run) -> tuple[list[str], Any, Any]:
    """Return what a profiler sees of a run, and the run's tensors without one and with it."""
    plain, _ = run.train(run.state(world))
    with torch.profiler.profile() as profile:
        watched, _ = run.train(run.state(world))
    seen = [event.name for event in profile.events()]
    return seen, tensors(plain), tensors(watched)
