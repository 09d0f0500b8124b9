# SPDX-License-Identifier: Apache-2.0
"""Schedules that train next to nothing are told once, and others never."""

import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import lr_scheduler

import accelfn as af
from accelfn.testing import simulate
from tests.laws.torch_schedulers import SCHEDULERS
from tests.laws.worlds import DDP

X = torch.ones(2, 2)


def told(schedule: Any, updates: int, optimizer: Any = None, setup: Any = None) -> list:
    """Return what is warned of while updates are taken, and at which."""
    state = af.TrainState.create(
        model=partial(torch.nn.Linear, 2, 1),
        optimizer=optimizer or partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        schedule=schedule,
        setup=setup,
    )
    step = af.make_step(lambda model, batch: model(batch).square().mean())
    found = []
    for update in range(updates):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            state, _ = step(state, X)
        found += [(update, str(each.message)) for each in caught]
    return found


SHAPES: dict[str, Callable[[int], float]] = {
    "constant": lambda _: 1.0,
    "decay": lambda update: 0.99**update,
    "warm-up": lambda update: min(1.0, (update + 1) / 50),
    "inverse": lambda update: (1 + update) ** -0.5,
    "cosine": lambda update: 0.5 + 0.5 * math.cos(update / 40),
}


@given(
    shape=st.sampled_from(sorted(SHAPES)),
    rate=st.floats(1e-6, 0.0099),
    wraps=st.booleans(),
)
def test_rates_for_factors_are_told(shape: str, rate: float, wraps: bool) -> None:
    """A10: a schedule of absolute learning rates is told, once, with what to write."""
    absolute = lambda update: rate * SHAPES[shape](update)  # noqa: E731
    schedule = partial(absolute) if wraps else absolute
    found = told(schedule, 3)
    assert [update for update, _ in found] == [0]
    said = found[0][1]
    assert "factors" in said
    assert f"the largest factor here is only {max(map(absolute, range(99))):g}" in said


@st.composite
def factors(draw: st.DrawFn) -> tuple[Any, int]:
    """Draw a schedule that is meant, and how many updates are taken with it."""
    total = draw(st.integers(2, 40))
    scale = draw(st.sampled_from([0.01, 0.1, 1.0, 3.0]))
    period = draw(st.integers(1, 12))
    made = draw(
        st.sampled_from(
            [
                af.schedules.constant(scale),
                af.schedules.linear(total),
                af.schedules.linear(1000 * total, start=0.0, end=1.0),
                af.schedules.warmup_cosine(1, total, end=0.0),
                af.schedules.one_cycle(total),
                af.schedules.join((1, af.schedules.constant(0.0)), lambda _: scale),
                lambda update: abs(math.cos(update / period)) * scale,
                lambda update: float(update % period == period - 1),
                lambda update: [0.0, 1.0][update // 40 % 2],
                lambda _: 0.0,
            ]
        )
    )
    rounded = draw(st.integers(0, 9))
    whole = isinstance(made, (af.schedules.linear, af.schedules.warmup_cosine))
    return made, min(total + rounded, 45) if whole else 45


@given(drawn=factors())
def test_factors_are_never_told(drawn: tuple[Any, int]) -> None:
    """A10: warm-ups, decays, cycles and pauses raise no warning, nor do a few updates more."""
    schedule, updates = drawn
    assert told(schedule, updates) == []


@given(name=st.sampled_from(sorted(SCHEDULERS)), data=st.data())
def test_schedulers_of_torch_are_not_told(name: str, data: st.DataObject) -> None:
    """A10: a torch scheduler's rates are no factors, however small; none is told in its time."""
    factory = data.draw(SCHEDULERS[name](1, *[True]))
    assert told(af.schedules.from_torch(factory), 10) == []


def two_groups(named: Any) -> torch.optim.Optimizer:
    """Return an optimizer of two groups, of a parameter each."""
    return torch.optim.SGD([{"params": [p], "lr": 0.1} for _, p in named])


def ends_at(end: int, update: int) -> float:
    return max(0.0, 1 - update / end)


@given(end=st.integers(1, 30), by=st.sampled_from(["own", "torch", "both", "one"]))
def test_a_schedule_that_ends_before_the_run(end: int, by: str) -> None:
    """A10: ten updates, or a tenth, at a rate of 0 in all groups are told once."""
    line = partial(ends_at, end)
    linear = partial(
        lr_scheduler.LinearLR, start_factor=1, end_factor=0, total_iters=end
    )
    schedule: Any = af.schedules.linear(end)
    if by != "own":
        groups = [line, line if by == "both" else partial(math.pow, 1.0)]
        each = partial(lr_scheduler.LambdaLR, lr_lambda=groups)
        schedule = af.schedules.from_torch(linear if by == "torch" else each)
    optimizer = two_groups if by in ("both", "one") else None
    found = told(schedule, end + 40, optimizer)
    if by == "one":
        assert found == []
        return
    assert len(found) == 1
    ((update, said),) = found
    assert end + 10 <= update <= end + 21
    assert f"0 since update {end}, and" in said


@given(where=st.sampled_from(["lr", (0, "lr"), ("all", "lr")]))
def test_rates_of_a_transform_are_its_own(where: Any) -> None:
    """Where a transform sets rates, of all groups or of one, the schedule's end is none."""

    def optimizer(named: Any) -> torch.optim.Optimizer:
        params = [param for _, param in named]
        return torch.optim.SGD([{"params": params, "name": "all"}], lr=0.1)

    @af.transform
    class Sets:
        def hyper(self, hyper: Any, slot: None, update: Any) -> Any:
            return {where: 0.1}, slot

    assert told(af.schedules.linear(2), 40, optimizer, setup=Sets()) == []


def test_one_rank_tells():
    """Of ranks that train the same, one warns."""

    def rank(world: af.World) -> None:
        state = af.TrainState.create(
            model=partial(torch.nn.Linear, 2, 1),
            optimizer=partial(torch.optim.SGD, lr=0.1),
            schedule=lambda _: 1e-3,
            setup=DDP,
            world=world,
        )
        af.prepare_engine(state)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        simulate(2, rank)
    assert len([each for each in caught if "factors" in str(each.message)]) == 1
