# SPDX-License-Identifier: Apache-2.0
"""Ranks that have a part of the model each train what one rank with all of it does."""

from math import prod

import attrs
import torch
from hypothesis import given
from hypothesis import strategies as st

import accelfn as af
from accelfn.testing import simulate
from tests.laws.split_models import AXES, LOSSES, Run, runs, wraps
from tests.laws.worlds import close_means, single
from tests.strategies import differences, tensors

Found = tuple[dict[str, torch.Tensor], list[dict[str, float]], tuple[int, ...]]


def trained(world: af.World, run: Run, *engine: object, updates: int = 3) -> Found:
    """Return what a state has after some updates, each one's metrics, and what was skipped."""
    state, step, means = run.state(world, *engine), af.make_step(LOSSES[run.loss]), []
    for batch in run.batches(state, updates):
        state, metrics = step(state, batch)
        means.append(metrics.all_reduce_mean(world))
    return tensors(state), means, (state.step, state.num_skipped)


@given(
    run=runs(),
    wrap=wraps,
    axes=st.sampled_from(AXES),
    dtype=st.sampled_from([torch.float64, torch.float64, torch.float32]),
)
def test_parts_train_what_the_whole_does(
    run: Run, wrap: object, axes: dict[str, int], dtype: torch.dtype
) -> None:
    """Parameters, buffers, optimizer state, averages and metrics are those of one rank.

    Buffers are compared where the first rank has seen what one alone sees.
    """
    run = attrs.evolve(run, dtype=dtype)
    alone, means, _ = trained(single(), run)
    ranks = simulate(prod(axes.values()), lambda w: trained(w, run, wrap), axes=axes)
    within = 1e-13 if dtype is torch.float64 else 1e-6
    for found, seen, _ in ranks:
        del found["buffers.seen"]
        whole = {name: value for name, value in alone.items() if name in found}
        assert differences(whole, found, within=within) == []
        if dtype is torch.float64:
            assert all(close_means(*pair) for pair in zip(means, seen, strict=True))
