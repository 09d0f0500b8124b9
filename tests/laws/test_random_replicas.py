# SPDX-License-Identifier: Apache-2.0
"""Ranks that train apart are as many plain loops, averaged by hand.

Whatever is beside it: moving averages, skips, clipping, frozen parameters, batch statistics,
uneven and empty shares, averages in mid-period, and a resume on as many ranks or others.
"""

import math
import tempfile
from functools import partial
from pathlib import Path

import torch
from hypothesis import example, given
from hypothesis import strategies as st

import accelfn as af
from accelfn.testing import simulate
from tests.laws.replicas_by_hand import (
    OPTIMIZERS,
    Found,
    Moment,
    Setup,
    by_hand,
    loss_fn,
)
from tests.strategies import differences


def train(setup: Setup, folder: Path, world: af.World, *, first: bool) -> list[Moment]:
    """Train to the cut and save, or load and train from there to the end."""

    def frozen(state, at):
        if at < setup.frozen_from:
            return state
        return state.with_trainable(lambda name, _: name.startswith("head"))

    state, begin = setup.state(world), 0 if first else setup.cut
    if not first:
        state = af.load(frozen(state, begin - 1), folder)
    end = setup.cut if first else setup.updates
    step, moments = af.make_step(loss_fn), list[Moment]()
    for i in range(begin, end):
        state = frozen(state, i)
        state, metrics = step(state, next(iter(af.batches(state))))
        if i in setup.finalized:
            state = af.finalize(state)
        kept = {
            f"{name}.{key}": value.clone()
            for name, entry in state.opt_state.items()
            for key, value in sorted(entry.items())
            if isinstance(value, torch.Tensor) and key != "step"
        }
        moments.append(
            Moment(
                {n: p.clone() for n, p in state.params.items()},
                {n: p.clone() for n, p in af.eval_params(state).items()},
                {str(i): kept[key] for i, key in enumerate(_in_order(kept, state))},
                state.buffers["seen"].clone(),
                float(metrics.all_reduce_mean(world)["loss"]),
                state.num_skipped,
            )
        )
    if first:
        af.save(state, folder)
    return moments


def _in_order(kept: Found, state: af.TrainState) -> list[str]:
    return [key for name in state.params for key in kept if key.startswith(f"{name}.")]


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    n, updates = draw(st.integers(3, 12)), draw(st.integers(1, 7))
    judge = draw(st.sampled_from([None, "skip", "fp16"]))
    sizes = st.sampled_from([(2, 2), (3, 3), (2, 3), (3, 2), (2, 1), (1, 2), (4, 2)])
    return Setup(
        sizes=draw(sizes),
        every=draw(st.integers(1, 4)),
        opt_state=draw(st.booleans()),
        buffers=draw(st.booleans()),
        optimizer=draw(st.sampled_from(sorted(OPTIMIZERS))),
        decay=draw(st.none() | st.sampled_from([0.5, 0.75])),
        average_first=draw(st.booleans()),
        clip=draw(st.none() | st.sampled_from([0.05, 0.5])),
        micro=draw(st.integers(1, 2)),
        judge=judge,
        broken=None if judge is None else draw(st.none() | st.integers(0, n - 1)),
        n=n,
        batch_size=draw(st.integers(1, 7)),
        seed=draw(st.integers(0, 99)),
        updates=updates,
        cut=draw(st.integers(0, updates)),
        finalized=tuple(draw(st.sets(st.integers(0, updates), max_size=2))),
        frozen_from=draw(st.integers(0, 2 * updates)),
    )


AVERAGED = Setup(
    sizes=(2, 3),
    every=1,
    opt_state=False,
    buffers=False,
    optimizer="adam",
    decay=None,
    average_first=False,
    clip=None,
    micro=1,
    judge=None,
    broken=None,
    n=3,
    batch_size=1,
    seed=0,
    updates=2,
    cut=1,
    finalized=(),
    frozen_from=0,
)
"""Loaded on more ranks just after an average."""


@given(setup=setups())
@example(AVERAGED)
def test_ranks_apart_are_loops_apart(setup):
    """Each rank holds what a loop of its own holds, and all evaluate the mean of the loops."""
    with tempfile.TemporaryDirectory() as folder:
        halves = [
            simulate(
                size, partial(train, setup, Path(folder) / "saved", first=first)
            ).results
            for size, first in zip(setup.sizes, (True, False), strict=True)
        ]
    found = [ranks for half in halves for ranks in zip(*half, strict=True)]
    for expected, ranks in zip(by_hand(setup), found, strict=True):
        for one, two in zip(expected, ranks, strict=True):
            assert differences(one.params, two.params, within=1e-9) == []
            assert differences(one.evaluated, two.evaluated, within=1e-9) == []
            assert differences(one.moments, two.moments, within=1e-9) == []
            known = ~one.seen.isnan()
            assert torch.allclose(one.seen[known], two.seen[known], rtol=1e-9)
            assert math.isclose(one.loss, two.loss, rel_tol=1e-9, abs_tol=1e-9) or (
                math.isnan(one.loss) and math.isnan(two.loss)
            )
            assert one.skipped == two.skipped
