# SPDX-License-Identifier: Apache-2.0
"""A profile has a span for each part of a step, and changes no result."""

import tempfile
from functools import partial
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

import accelfn as af
from tests.states import linear_state, values

FIELDS = {
    af.clip_grad_norm(1.0): ("clip_grad_norm.grads",),
    af.ema(0.9): ("ema.after_update", "ema.eval_params"),
    af.skip_nonfinite(): ("skip_nonfinite.grads", "skip_nonfinite.after_update"),
}
"""The fields in which each transform acts on a step."""


def trained(setup: af.Transform, profiler: Any) -> af.TrainState:
    """Return the state after an epoch, with a look at each evaluation parameter."""
    state = linear_state(
        3,
        optimizer=partial(torch.optim.AdamW, lr=0.1),
        data=af.Data(torch.linspace(-1, 1, 48).reshape(16, 3), global_batch_size=4),
        setup=setup,
    )
    step = af.make_step(lambda model, batch: model(batch).square().mean())
    for batch in af.batches(state, until_epoch=1):
        state, _ = step(state, batch)
        af.eval_params(state)  # beside steps
        if profiler is not None:
            profiler.step()
    return state


@given(
    ways=st.lists(st.sampled_from([*FIELDS]), unique=True),
    num_parts=st.integers(1, 3),
    active=st.integers(1, 2),
    in_backward=st.booleans(),
)
def test_each_part_of_a_step_has_a_span(ways, num_parts, active, in_backward):
    """So has each field of a transform, and training is bitwise the same."""
    first = af.accumulate(num_micro_batches=num_parts)
    if in_backward:
        first, ways = af.optimizer_in_backward(), [w for w in ways if w == af.ema(0.9)]
    setup = af.chain(first, *ways)
    with (
        tempfile.TemporaryDirectory() as folder,
        af.profile(folder, af.World.single(), active=active) as profiler,
    ):
        seen = trained(setup, profiler)
    spans = {
        each.key.removeprefix("accelfn ")
        for each in profiler.key_averages()
        if each.key.startswith("accelfn ")
    }

    assert values(trained(setup, None)) == values(seen)
    fields = {name for way in ways for name in FIELDS[way]}
    if not in_backward:
        fields.add("accumulate.value_and_grad")
    own = "step in backward" if in_backward else "optimizer"
    expected = {"data", "forward", "backward", own}
    for name in fields:
        transform, _, field = name.partition(".")
        expected.add(f"{field} {transform}")
    assert expected == spans - {"value_and_grad", "apply_grads", "step"}
