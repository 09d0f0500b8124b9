# SPDX-License-Identifier: Apache-2.0
"""Schedules are pure functions of the update number; what is none is refused."""

import itertools
import math
import random
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import lr_scheduler

import accelfn as af
from accelfn import schedules
from accelfn.errors import ArgumentError
from tests.states import linear_state

HALVE = partial(lr_scheduler.StepLR, step_size=3, gamma=0.5)
PLATEAU = lr_scheduler.ReduceLROnPlateau
STEP = af.make_step(lambda model, batch: model(batch).mean())
X = torch.ones(2, 2)


def on_groups(factory):
    """Return a state of an optimizer with two groups, scheduled by a torch scheduler."""

    def optimizer(named):
        groups = [
            {"params": [p], "lr": r}
            for (_, p), r in zip(named, (0.1, 0.2), strict=True)
        ]
        return torch.optim.SGD(groups, momentum=0.9)

    return linear_state(2, optimizer=optimizer, schedule=schedules.from_torch(factory))


class Timm:
    """A scheduler as those of timm are, which callers tell the epoch or the update."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self, epoch, metric=None):
        raise NotImplementedError

    def step_update(self, num_updates, metric=None):
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] / (1 + num_updates)


class OfTimm(lr_scheduler.LRScheduler):
    """What the error of such a scheduler says to write."""

    def __init__(self, optimizer):
        self.timm = Timm(optimizer)
        super().__init__(optimizer)

    def get_lr(self):
        self.timm.step_update(self.last_epoch)
        return [group["lr"] for group in self.optimizer.param_groups]


def test_a_scheduler_of_timm_works_as_the_error_says():
    """Its methods are told a number, so it goes into an LRScheduler."""
    state = on_groups(OfTimm)
    for update in range(3):
        expected = [lr / (1 + update) for lr in (0.1, 0.2)]
        assert pytest.approx(expected) == list(state.lrs)
        state, _ = STEP(state, X)


class Looks(lr_scheduler.LRScheduler):
    """Looks at the optimizer's state, so it is no function of the update."""

    def get_lr(self):
        group = self.optimizer.param_groups[0]
        return [self.optimizer.state[group["params"][0]]["step"]]


def of_another(_):
    """Return a scheduler whose rates would never move those of the state."""
    return HALVE(torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=0.1))


THREE = partial(lr_scheduler.OneCycleLR, max_lr=[0.1] * 3, total_steps=20)
METRIC = r"ReduceLROnPlateau.*af\.reduce_lr_on_plateau"


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        (None, "expected a function that takes"),
        (0.1, "expected a function that takes"),
        (PLATEAU, METRIC),
        (partial(PLATEAU, factor=0.5), METRIC),
        (lambda optimizer: PLATEAU(optimizer, factor=0.5), METRIC),
        (Timm, "returned Timm, (?!.*metric).*needs epoch.*get_lr"),
        (lambda optimizer: optimizer, r"returned \w+.*LRScheduler"),
        (lambda _: None, r"returned \w+.*LRScheduler"),
        (of_another, "for another optimizer"),
        (THREE, "SGD .parameter groups: 2.: ValueError: max_lr"),
        (Looks, "reads the optimizer's state"),
    ],
)
def test_from_torch_refuses_what_is_no_scheduler_of_the_update(factory, words):
    """At once where the factory shows it; else by `create`, which has the groups."""
    with pytest.raises(ArgumentError, match=words):
        on_groups(factory)


def test_from_torch_is_no_factor():
    """Called, or joined, it says what to do: it has rates of groups, and no factors."""
    halve = schedules.from_torch(HALVE)
    with pytest.raises(ArgumentError, match=r"state\.lrs"):
        halve(3)
    for parts in ([(3, halve), schedules.constant()], [(3, lambda _: 1.0), halve]):
        with pytest.raises(ArgumentError, match="SequentialLR"):
            schedules.join(*parts)


def test_from_torch_of_a_partition():
    """The groups of a partition are numbered through; momenta of two kinds are refused."""
    optimizer = af.combine_optimizers(
        (lambda name, _: name == "bias", partial(torch.optim.Adagrad, lr=0.5)),
        (..., partial(torch.optim.SGD, lr=0.25, momentum=0.9)),
    )
    make = partial(linear_state, 2, optimizer=optimizer)
    factors = [lambda step: 1 / (1 + step), lambda step: 2.0**-step]
    schedule = schedules.from_torch(partial(lr_scheduler.LambdaLR, lr_lambda=factors))
    state = make(schedule=schedule)
    for _ in range(2):
        state, _ = STEP(state, X)
    assert state.lrs == (0.5 / 3, 0.25 / 4)
    cycle = partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=9)
    with pytest.raises(ArgumentError, match="cycle_momentum"):
        make(schedule=schedules.from_torch(cycle))


class Moves(lr_scheduler.LRScheduler):
    """Raises the momentum of some groups at some updates, and nothing before."""

    def __init__(self, optimizer, at):
        self.at = at
        super().__init__(optimizer)

    def get_lr(self):
        for group, at in zip(self.optimizer.param_groups, self.at, strict=True):
            if self.last_epoch >= at:
                group["momentum"] = 0.5 + self.last_epoch / 1000
        return [group["lr"] for group in self.optimizer.param_groups]


@given(
    at=st.lists(st.integers(0, 6), min_size=1, max_size=2),
    asked=st.lists(st.integers(0, 8), min_size=1, max_size=3),
)
def test_a_momentum_that_moves_late(at, asked):
    """Until a scheduler first moves a momentum, it is the given one; then that of the update."""
    groups = [{"params": [torch.nn.Parameter(torch.zeros(()))]} for _ in at]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.25)
    rates = schedules.from_torch(partial(Moves, at=at)).on(optimizer)
    for update in asked:
        for i, first in enumerate(at):
            expected = 0.25 if update < first else 0.5 + update / 1000
            assert rates(update).get((i, "momentum"), 0.25) == expected


@pytest.mark.parametrize(("start", "end"), [(1.0, 0.0), (0.5, 0.75)])
def test_linear_is_a_line(start, end):
    """It stays at its end."""
    line = [start + (end - start) * min(i / 8, 1.0) for i in range(12)]
    schedule = schedules.linear(8, start=start, end=end)
    assert line == [schedule(i) for i in range(12)]


@given(num_warmup=st.integers(0, 50), num_more=st.integers(1, 50))
def test_a_warm_up_is_a_straight_line(num_warmup, num_more):
    """It rises by equal steps, from the first update on, to 1 at the first update after it."""
    factor = schedules.warmup_cosine(num_warmup, num_warmup + num_more)
    line = [i / (num_warmup + 1) for i in range(1, num_warmup + 2)]
    assert [factor(i) for i in range(num_warmup + 1)] == pytest.approx(line, rel=1e-12)


def test_shapes():
    """Behind its warm-up a cosine falls to `end` and stays; a cycle peaks; a constant is one."""
    factors = [*map(schedules.warmup_cosine(4, 12, end=0.1), range(20))]
    assert all(a > b for a, b in itertools.pairwise(factors[4:13]))
    assert factors[8] == pytest.approx(0.55)
    assert factors[12:] == pytest.approx([0.1] * 8)
    cycle = schedules.one_cycle(11, peak_at=0.5, start=0.1, end=0.01)
    assert [*map(cycle, (0, 5, 10, 99))] == pytest.approx([0.1, 1.0, 0.01, 0.01])
    assert [*map(schedules.constant(0.5), (0, 10**9))] == [0.5, 0.5]


@given(lengths=st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_join_starts_each_again(lengths):
    """Each part of join is asked for its own updates, from 0 on; the last for the rest."""

    def part(number):
        return lambda update: 100.0 * number + update

    *parts, last = map(part, range(len(lengths)))
    joined = schedules.join(*zip(lengths[:-1], parts, strict=True), last)
    expected = [part(n)(i) for n, length in enumerate(lengths) for i in range(length)]
    assert expected == [joined(i) for i in range(len(expected))]
    assert joined(len(expected) + 10) == part(len(lengths) - 1)(lengths[-1] + 10)


LINE = schedules.linear(3)
BAD = [
    ("linear", partial(schedules.linear, 3, start=math.nan)),
    ("linear", partial(schedules.linear, 3, end=math.inf)),
    ("constant", partial(schedules.constant, -0.1)),
    ("constant", partial(schedules.constant, "1")),
    ("warmup_cosine", partial(schedules.warmup_cosine, 3, 3)),
    ("warmup_cosine", partial(schedules.warmup_cosine, 1, 3, end=-1.0)),
    ("one_cycle", partial(schedules.one_cycle, 5, peak_at=0)),
    ("one_cycle", partial(schedules.one_cycle, 5, peak_at=1.0)),
    ("join", schedules.join),
    ("join", partial(schedules.join, (3, LINE))),
    ("join", partial(schedules.join, LINE, LINE)),
    ("join", partial(schedules.join, (True, LINE), LINE)),
    ("join", partial(schedules.join, (0, LINE), LINE)),
    ("join", partial(schedules.join, (), LINE)),
    ("join", partial(schedules.join, (3,), LINE)),
    ("join", partial(schedules.join, (3, "linear"), LINE)),
]


@pytest.mark.parametrize(("name", "call"), BAD)
def test_bad_arguments(name, call):
    """A count below its least, or a factor that is none, is refused with its value."""
    with pytest.raises(ArgumentError, match=rf"schedules\.{name}"):
        call()


def test_schedule_is_a_function():
    """Something that cannot be called is refused when the state is created."""
    with pytest.raises(ArgumentError, match=r"schedule=0\.1.*af\.schedules"):
        linear_state(schedule=0.1)


@pytest.mark.parametrize(
    ("schedule", "error", "words"),
    [
        (lambda _: math.nan, af.errors.Error, "schedule"),
        (lambda _: math.inf, af.errors.Error, "schedule"),
        (lambda _: object(), af.errors.Error, "schedule"),
        (lambda _: 1 / 0, ZeroDivisionError, "division"),
    ],
)
def test_schedule_that_gives_no_factor(schedule, error, words):
    """The state is created, but no update taken; the state stays usable."""
    state = linear_state(2, schedule=schedule)
    before = {name: param.clone() for name, param in state.params.items()}
    with pytest.raises(error, match=words):
        STEP(state, X)
    assert all(torch.equal(before[name], state.params[name]) for name in before)
    assert state.copy().step == 0


@pytest.mark.parametrize(
    "make", [lambda: itertools.count(1).__next__, lambda: partial(random.gauss, 0, 1)]
)
def test_a_schedule_that_counts_its_calls_or_draws_is_refused(make):
    """A run could not be resumed, and every look at a rate would change the next."""
    number = make()
    with pytest.raises(ArgumentError, match=r"for update 0, and .* called again"):
        linear_state(schedule=lambda _: number())
