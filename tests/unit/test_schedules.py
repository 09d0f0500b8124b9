# SPDX-License-Identifier: Apache-2.0
"""Schedules are pure functions of the update number, and equal torch's own."""

import itertools
import math
from functools import partial

import pytest
import torch
from torch.optim import lr_scheduler

import accelfn as af
from accelfn import schedules

PEAK = 0.4


def torch_rates(factory, num, lr=PEAK):
    """Return the learning rates that torch's scheduler sets in a hand-written loop."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=lr)
    scheduler = factory(optimizer)
    rates = []
    for _ in range(num):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


FACTORIES = {
    "StepLR": partial(lr_scheduler.StepLR, step_size=3, gamma=0.5),
    "CosineAnnealing": partial(lr_scheduler.CosineAnnealingLR, T_max=10),
    "Exponential": partial(lr_scheduler.ExponentialLR, gamma=0.9),
    "OneCycle": partial(
        lr_scheduler.OneCycleLR, max_lr=PEAK, total_steps=16, cycle_momentum=False
    ),
    "Cyclic": partial(
        lr_scheduler.CyclicLR,
        base_lr=0.1,
        max_lr=PEAK,
        step_size_up=4,
        cycle_momentum=False,
    ),
}


@pytest.mark.parametrize("name", FACTORIES)
def test_from_torch_equals_torch(name):
    """from_torch gives the rates of torch's scheduler, in any order of asking."""
    expected = torch_rates(FACTORIES[name], 15)
    schedule = schedules.from_torch(FACTORIES[name], lr=PEAK)
    actual = {step: schedule(step) * PEAK for step in (14, 3, *range(15))}
    assert expected == pytest.approx([actual[i] for i in range(15)], rel=1e-12)


@pytest.mark.parametrize("name", ["StepLR", "CosineAnnealing", "Exponential"])
def test_from_torch_multiplies_any_rate(name):
    """A scheduler that multiplies needs no lr=."""
    expected = torch_rates(FACTORIES[name], 12)
    schedule = schedules.from_torch(FACTORIES[name])
    assert expected == pytest.approx([schedule(i) * PEAK for i in range(12)], rel=1e-9)


def test_from_torch_refuses_a_scheduler_of_a_metric():
    """ReduceLROnPlateau is no function of the update number; the way out is named."""
    with pytest.raises(af.ArgumentError, match=r"ReduceLROnPlateau.*hyper"):
        schedules.from_torch(lr_scheduler.ReduceLROnPlateau)


@pytest.mark.parametrize("factory", [lambda opt: opt, lambda _: None])
def test_from_torch_refuses_what_is_no_scheduler(factory):
    """A factory of something else is refused with what it gave."""
    with pytest.raises(af.ArgumentError, match=r"factory gave \w+.*LRScheduler"):
        schedules.from_torch(factory)


@pytest.mark.parametrize("lr", [0, -1.0, math.nan])
def test_from_torch_refuses_a_rate(lr):
    """A learning rate of 0 or below has no factors."""
    with pytest.raises(af.ArgumentError, match=r"from_torch\(lr="):
        schedules.from_torch(FACTORIES["StepLR"], lr=lr)


@pytest.mark.parametrize(("start", "end"), [(1.0, 0.0), (0.0, 1.0), (0.5, 0.25)])
def test_linear_equals_lambda_lr(start, end):
    """Linear is LambdaLR with the straight line, and stays at the end."""
    line = lambda i: start + (end - start) * min(i / 8, 1.0)  # noqa: E731
    expected = torch_rates(partial(lr_scheduler.LambdaLR, lr_lambda=line), 12)
    schedule = schedules.linear(8, start=start, end=end)
    assert expected == [PEAK * schedule(i) for i in range(12)]


def test_constant():
    """Constant is its factor at any update."""
    assert [schedules.constant(0.5)(i) for i in (0, 10**9)] == [0.5, 0.5]


def test_warmup_cosine_shape():
    """It rises from above 0 to 1 at the end of the warm-up, falls to `end`, and stays."""
    schedule = schedules.warmup_cosine(4, 12, end=0.1)
    factors = [schedule(i) for i in range(20)]
    assert 0 < factors[0] < 1
    assert sorted(factors[:5]) == factors[:5]
    assert factors[4] == 1.0
    assert all(a > b for a, b in itertools.pairwise(factors[4:13]))
    assert factors[12:] == pytest.approx([0.1] * 8)


def test_warmup_cosine_without_warmup():
    """With no warm-up it begins at 1."""
    assert schedules.warmup_cosine(0, 3)(0) == 1.0


def test_one_cycle_shape():
    """It rises from `start` to 1 near the peak and falls to `end`, where it stays."""
    schedule = schedules.one_cycle(11, peak_at=0.5, start=0.1, end=0.01)
    assert pytest.approx([schedule(i) for i in (0, 5, 10, 99)]) == [
        0.1,
        1.0,
        0.01,
        0.01,
    ]


def test_join_starts_each_again():
    """Each part of join counts from 0, and the last runs for the rest."""
    joined = schedules.join(
        (3, schedules.linear(3, start=0.0, end=1.0)), schedules.linear(2)
    )
    assert [joined(i) for i in range(7)] == [0.0, 1 / 3, 2 / 3, 1.0, 0.5, 0.0, 0.0]


BAD = {
    "linear 0": lambda: schedules.linear(0),
    "linear negative": lambda: schedules.linear(-1),
    "linear float": lambda: schedules.linear(1.5),
    "linear bool": lambda: schedules.linear(num_updates=True),
    "linear nan": lambda: schedules.linear(3, start=math.nan),
    "linear inf": lambda: schedules.linear(3, end=math.inf),
    "constant negative": lambda: schedules.constant(-0.1),
    "constant text": lambda: schedules.constant("1"),
    "cosine 0": lambda: schedules.warmup_cosine(0, 0),
    "cosine negative": lambda: schedules.warmup_cosine(-1, 3),
    "cosine all warm-up": lambda: schedules.warmup_cosine(3, 3),
    "cosine end": lambda: schedules.warmup_cosine(1, 3, end=-1.0),
    "one_cycle 1": lambda: schedules.one_cycle(1),
    "one_cycle peak 0": lambda: schedules.one_cycle(5, peak_at=0),
    "one_cycle peak 1": lambda: schedules.one_cycle(5, peak_at=1.0),
    "join nothing": schedules.join,
    "join pair last": lambda: schedules.join((3, schedules.linear(3))),
    "join no pair": lambda: schedules.join(schedules.linear(3), schedules.linear(3)),
    "join 0 updates": lambda: schedules.join(
        (0, schedules.linear(3)), schedules.linear(1)
    ),
    "join empty pair": lambda: schedules.join((), schedules.linear(3)),
    "join no schedule": lambda: schedules.join((3,), schedules.linear(3)),
    "join text": lambda: schedules.join((3, "linear"), schedules.linear(3)),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments(case):
    """A count below its least, or a factor that is none, is refused with its value."""
    name = case.split(maxsplit=1)[0].replace("cosine", "warmup_cosine")
    with pytest.raises(af.ArgumentError, match=rf"schedules\.{name}") as caught:
        BAD[case]()
    assert isinstance(caught.value, ValueError)


def make(schedule):
    """Return a small state with a schedule."""
    return af.TrainState.create(
        model=lambda: torch.nn.Linear(2, 1),
        optimizer=partial(torch.optim.SGD, lr=0.5),
        schedule=schedule,
    )


def test_schedule_is_a_function():
    """Something that cannot be called is refused when the state is created."""
    with pytest.raises(af.ArgumentError, match=r"schedule=0\.1.*af\.schedules"):
        make(0.1)


@pytest.mark.parametrize("factor", [math.nan, math.inf, None, "1"])
def test_schedule_that_gives_no_factor(factor):
    """A factor that is no finite number is refused before the update."""
    state = make(lambda _: factor)
    before = {name: param.clone() for name, param in state.params.items()}
    step = af.make_step(lambda model, batch: model(batch).mean())
    with pytest.raises(af.Error, match="schedule"):
        step(state, torch.ones(2, 2))
    assert all(torch.equal(before[name], state.params[name]) for name in before)


def test_schedule_that_raises_leaves_the_state():
    """An error of the schedule's own goes through, and the state stays usable."""

    def schedule(_):
        raise ZeroDivisionError

    state = make(schedule)
    step = af.make_step(lambda model, batch: model(batch).mean())
    with pytest.raises(ZeroDivisionError):
        step(state, torch.ones(2, 2))
    assert state.copy().step == 0


def test_rate_of_each_update():
    """Update t is taken at the rate times schedule(t), and `lrs` says so before."""
    state = make(schedules.linear(4))
    step = af.make_step(lambda model, batch: model(batch).sum())
    rates, moved = [], []
    for _ in range(5):
        bias = float(state.params["bias"])
        rates.append(state.lrs[0])
        state, _ = step(state, torch.zeros(1, 2))
        moved.append(bias - float(state.params["bias"]))
    assert rates == [0.5, 0.375, 0.25, 0.125, 0.0]
    assert rates == pytest.approx(moved, abs=1e-6)
