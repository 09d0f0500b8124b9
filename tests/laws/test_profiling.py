# SPDX-License-Identifier: Apache-2.0
"""A profile tells where all of a step's time goes, and changes nothing of what it looks at."""

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
"""What a breakdown calls the time that a transform takes."""
IN_ANY = {"data", "forward", "backward", "optimizer", "accelfn itself", "outside"}


def trained(setup: af.Transform, profiler: Any) -> af.TrainState:
    """Return the state after an epoch, with a look at each evaluation parameter."""
    state = linear_state(
        3,
        optimizer=partial(torch.optim.AdamW, lr=0.1),
        data=af.Data(torch.linspace(-1, 1, 48).reshape(16, 3), batch_size=4),
        setup=setup,
    )
    step = af.make_step(lambda model, batch: model(batch).square().mean())
    for batch in af.batches(state, epochs=1):
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
def test_all_of_a_step_is_told(
    ways: list[af.Transform], num_parts: int, active: int, in_backward: bool
) -> None:
    """The parts add up to the step, each transform has its own, and training is as ever."""
    first = af.accumulate(num_micro_batches=num_parts)
    if in_backward:
        first, ways = af.optimizer_in_backward(), [w for w in ways if w == af.ema(0.9)]
    setup = af.chain(first, *ways)
    with (
        tempfile.TemporaryDirectory() as folder,
        af.profile(folder, af.World.single(), active=active) as profiler,
    ):
        seen = trained(setup, profiler)
    told = profiler.breakdown()

    assert values(trained(setup, None)) == values(seen)
    assert told.num_steps == active
    assert abs(sum(told.parts.values()) - told.whole) < 1e-9
    assert {name for way in ways for name in FIELDS[way]} == set(told.transforms)
    parts = IN_ANY - ({"optimizer"} if in_backward else set())
    parts |= {"transforms"} if ways else set()
    assert parts == {name for name, seconds in told.parts.items() if seconds > 0}
