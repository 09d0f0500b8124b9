# SPDX-License-Identifier: Apache-2.0
"""Losses that are scaled for 16 bits: the scale follows its rule, and changes no number."""

import functools
import math
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import accelfn as af
from accelfn.testing import simulate
from tests.laws.test_skipping import SEEDS, batches, create
from tests.laws.worlds import DDP, Found, params, single
from tests.strategies import Run, differences, tensors

pytestmark = (
    pytest.mark.filterwarnings(  # steps take other values than the state's data
        "ignore::accelfn.errors.AccelfnWarning"
    )
)


@given(
    overflows=st.lists(st.booleans(), max_size=12),
    growth=st.sampled_from([2.0, 4.0]),
    backoff=st.sampled_from([0.5, 0.25]),
    interval=st.integers(1, 3),
    size=st.integers(1, 2),
)
def test_the_scale_follows_its_rule(overflows, growth, backoff, interval, size):
    """It shrinks at an overflow, grows after so many good updates; the rate follows the step."""
    fp16 = af.autocast(
        "fp16",
        init_scale=2.0**10,
        growth_factor=growth,
        backoff_factor=backoff,
        growth_interval=interval,
    )

    def loss_fn(net: nn.Module, batch: Any) -> torch.Tensor:
        values, bad = batch
        factor = math.inf if bad else 1.0
        return (net(values[0]) - values[1]).square().mean() * factor

    def run(world: af.World) -> None:
        state, step = create(world, DDP, fp16), af.make_step(loss_fn)
        scale, good, taken = 2.0**10, 0, 0
        for bad in overflows:
            assert state.lrs == (0.25 * af.schedules.linear(16)(taken),)
            state, metrics = step(state, (batches(0, 1)[0], bad))
            assert float(metrics["loss_scale"]) == scale
            good = 0 if bad else good + 1
            taken += not bad
            if bad:
                scale *= backoff
            elif good == interval:
                scale, good = scale * growth, 0
            assert float(state.slots["autocast"]["scale"]) == scale
            assert int(state.slots["autocast"]["good"]) == good
            assert (state.step, state.num_skipped) == (taken, state.num_tried - taken)

    simulate(size, run)


@given(
    power=st.integers(-12, 20),
    run=st.builds(
        Run,
        n=st.just(12),
        batch_size=st.integers(1, 12),
        loss=st.sampled_from(["mean", "weighted", "squared"]),
        seed=SEEDS,
        dyadic=st.booleans(),
        optimizer=st.sampled_from(["sgd", "momentum", "adamw"]),
    ),
    micro=st.integers(1, 3),
    size=st.integers(1, 2),
)
def test_a_scale_that_is_a_power_of_2_changes_no_bit(power, run, micro, size):
    """Gradients, clipping and updates are bitwise those at scale 1, and close to those without."""

    def found(*setup: object) -> list[Found]:
        split = attrs.evolve(
            run,
            setup=af.chain(
                DDP,
                af.accumulate(num_micro_batches=micro),
                *setup,
                af.clip_grad_norm(0.5),
            ),
        )
        return simulate(
            size, lambda world: params(tensors(split.train(split.state(world))[0]))
        ).results

    # in float64 autocast leaves products alone: the scale is all that differs
    scaled = found(af.autocast("fp16", init_scale=2.0**power))
    for one, two in zip(
        found(af.autocast("fp16", init_scale=1.0)), scaled, strict=True
    ):
        assert differences(one, two) == []
    for one, two in zip(found(), scaled, strict=True):
        assert differences(one, two, within=1e-9) == []


@pytest.mark.parametrize("rows", [1, 37, 4096])
def test_a_loss_that_is_a_total_needs_no_smaller_scale(rows):
    """A sum over 4,096 rows overflows no sooner than their mean, and skips nothing."""
    torch.manual_seed(0)
    data = af.Data(
        (torch.randn(rows * 3, 8), torch.randn(rows * 3, 4)), global_batch_size=rows
    )

    def total(net: nn.Module, batch: Any) -> af.Loss:
        x, y = batch
        return af.Loss((net(x).float() - y).square().mean(1).sum(), len(x))

    def skipped(loss_fn: Any) -> int:
        state = af.TrainState.create(
            model=lambda: nn.Linear(8, 4),
            optimizer=functools.partial(torch.optim.SGD, lr=0.1),
            data=data,
            setup=af.autocast("fp16", init_scale=2.0**14),
            world=single(),
        )
        step = af.make_step(loss_fn)
        for batch in af.batches(state, until_epoch=1):
            state, _ = step(state, batch)
        return state.num_skipped

    assert skipped(total) == 0
