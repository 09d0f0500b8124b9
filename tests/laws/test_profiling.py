# SPDX-License-Identifier: Apache-2.0
"""A profile tells where all of a step's time goes, and changes nothing of what it looks at."""

import tempfile
from collections import Counter
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd.profiler_util import Interval
from torch.profiler import DeviceType

import accelfn as af
from accelfn.loop.breakdown import breakdown
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


PARTS = {
    **{f"accelfn {n}": n for n in ("data", "forward", "backward", "optimizer")},
    **{f"accelfn {n}": "accelfn itself" for n in ("value_and_grad", "apply_grads")},
    "accelfn reduce": "reduce",
    "accelfn grads clip": "clip.grads",
}
"""As which part the time of a span counts."""
OTHERS = "aten::mm", "accelfnot"
Spans = tuple[str, list[Any], list[int]]
"""A name, spans inside, and how long it goes before each of them and behind the last."""


@st.composite
def spans(draw: st.DrawFn, depth: int = 3) -> Spans:
    """Draw spans in one another, which may begin and end together with their neighbours."""
    inside = draw(st.lists(spans(depth - 1), max_size=2)) if depth else []
    gaps = draw(st.lists(st.integers(0, 2), min_size=1, max_size=1 + len(inside)))
    gaps += [0] * (1 + len(inside) - len(gaps))
    gaps[-1] += not sum(gaps)
    return draw(st.sampled_from([*PARTS, *OTHERS])), inside, gaps


def laid_out(given: Spans, begin: int, part: str, seen: Counter[str]) -> list[Any]:
    """Return the events of spans, the first of them last, and count what each part took."""
    (name, inside, gaps), events, at = given, list[Any](), begin
    part = PARTS.get(name, part)
    for gap, each in zip(gaps, [*inside, None], strict=True):
        at, seen[part] = at + gap, seen[part] + gap
        if each is not None:
            events += laid_out(each, at, part, seen)
            at = events[-1].time_range.end
    time, kind = Interval(begin, at), DeviceType.CPU
    return [*events, SimpleNamespace(name=name, time_range=time, device_type=kind)]


@given(
    steps=st.lists(st.lists(spans(), max_size=3), min_size=1, max_size=3),
    between=st.none() | spans(),
    data=st.data(),
)
def test_a_spans_time_is_what_no_span_in_it_took(
    steps: list[list[Spans]], between: Spans | None, data: st.DataObject
) -> None:
    """Of spans that begin, or end, where others do; and what lies in no step counts nowhere."""
    at, events, seen = 0, list[Any](), Counter[str]()
    for i, inside in enumerate(steps):
        step = f"ProfilerStep#{i}", inside, [*[0] * len(inside), 1]
        events += laid_out(step, at, "outside", seen)
        at = events[-1].time_range.end
        if between is not None:
            events += laid_out(between, at, "outside", Counter())
            at = events[-1].time_range.end
    told = breakdown(data.draw(st.permutations(events)))
    found = {**told.parts, **told.transforms}
    del found["transforms"]
    assert told.num_steps == len(steps)
    assert {
        name: pytest.approx(s * told.num_steps * 1e6) for name, s in found.items()
    } == {name: seen[name] for name in found}
    assert set(seen) <= set(found)
    assert told.whole * told.num_steps * 1e6 == pytest.approx(sum(seen.values()))
