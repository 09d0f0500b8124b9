# SPDX-License-Identifier: Apache-2.0
"""Ranks that have a part of the model each train what one rank with all of it does."""

from math import prod
from typing import Any

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


@af.transform
class Breaking:
    """Makes one element of one rank's part of a gradient infinite, at some updates."""

    rank: int
    updates: frozenset[int]

    def grads(self, grads: af.Grads, slot: None, update: af.Update) -> Any:
        if update.num_tried in self.updates:
            gradient = next(iter(grads.tensors.values()))
            part = getattr(gradient, "_local_tensor", gradient)
            if update.world.rank == self.rank and part.numel():
                part.view(-1)[-1] = float("inf")
        return grads, slot


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


@given(
    run=runs(behind=(), micro=1),
    wrap=wraps,
    axes=st.sampled_from(AXES[:6]),
    updates=st.frozensets(st.integers(0, 3), max_size=3),
    data=st.data(),
)
def test_an_update_is_skipped_on_all_ranks_or_none(
    run: Run, wrap: object, axes: dict[str, int], updates: frozenset[int], data: Any
) -> None:
    """Though one rank alone has the part of a gradient that is infinite."""
    size = prod(axes.values())
    # rows are 5: the last ranks of 8 have no part of the first gradient
    rank = data.draw(st.integers(0, min(size, 5) - 1 if size < 4 else 1))
    engine = wrap, Breaking(rank, updates=updates), af.skip_nonfinite()
    ranks = simulate(size, lambda w: trained(w, run, *engine, updates=4), axes=axes)
    skips = {numbers for _, _, numbers in ranks}
    assert skips == {(4 - len(updates), len(updates))}
    first = ranks[0][0]
    assert all(value.isfinite().all() for value in first.values())
    for found, _, _ in ranks[1:]:
        found["buffers.seen"] = first["buffers.seen"]  # those of rank 0 count
        assert differences(first, found) == []
