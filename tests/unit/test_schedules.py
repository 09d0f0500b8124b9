# SPDX-License-Identifier: Apache-2.0
"""Schedules are pure functions of the update number, and equal torch's own."""

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
from tests.states import linear_state

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


HALVE = partial(lr_scheduler.StepLR, step_size=3, gamma=0.5)


def on_groups(factory, *rates):
    """Return a state of an optimizer with these rates, scheduled by a torch scheduler."""

    def optimizer(named):
        params = [param for _, param in named]
        groups = [{"params": [p], "lr": r} for p, r in zip(params, rates, strict=True)]
        return torch.optim.SGD(groups, momentum=0.9)

    return linear_state(2, optimizer=optimizer, schedule=schedules.from_torch(factory))


def test_from_torch_of_onecycle_is_a_rate():
    """A1: OneCycleLR's rates are its own, whatever the optimizer's, and per group."""
    cycle = partial(lr_scheduler.OneCycleLR, max_lr=[0.1, 0.2], total_steps=20)
    assert on_groups(cycle, 0.1, 7.0).lrs == pytest.approx((0.004, 0.008), rel=1e-12)


def test_from_torch_past_its_end():
    """Where the scheduler has no rate, the update is named, again and again."""
    cycle = partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=3)
    state = on_groups(cycle, 0.1, 0.1)
    step = af.make_step(lambda model, batch: model(batch).mean())
    for _ in range(4):  # torch has one more than it says
        state, _ = step(state, torch.ones(2, 2))
    for _ in range(2):
        with pytest.raises(
            af.errors.ArgumentError, match="has no learning rate for update 4"
        ):
            step(state, torch.ones(2, 2))
    assert state.copy().step == 4


def test_from_torch_refuses_a_scheduler_of_a_metric():
    """ReduceLROnPlateau is no function of the update number; the way out is named."""
    plateau = lr_scheduler.ReduceLROnPlateau
    for factory in (plateau, partial(plateau, factor=0.5)):
        with pytest.raises(
            af.errors.ArgumentError,
            match=r"ReduceLROnPlateau.*af\.reduce_lr_on_plateau",
        ):
            schedules.from_torch(factory)
    with pytest.raises(
        af.errors.ArgumentError, match=r"ReduceLROnPlateau.*af\.reduce_lr_on_plateau"
    ):
        on_groups(lambda optimizer: plateau(optimizer, factor=0.5), 0.1, 0.1)


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


def test_from_torch_tells_how_to_use_a_scheduler_of_timm():
    """timm's schedulers are told a number and no metric, and work as the error says."""
    with pytest.raises(
        af.errors.ArgumentError, match="returned Timm, .*needs epoch.*get_lr"
    ) as e:
        on_groups(Timm, 0.1, 0.2)
    assert "metric" not in str(e.value)
    state = on_groups(OfTimm, 0.1, 0.2)
    step = af.make_step(lambda model, batch: model(batch).mean())
    for update in range(3):
        expected = [lr / (1 + update) for lr in (0.1, 0.2)]
        assert pytest.approx(expected) == list(state.lrs)
        state, _ = step(state, torch.ones(2, 2))


@pytest.mark.parametrize("factory", [lambda opt: opt, lambda _: None])
def test_from_torch_refuses_what_is_no_scheduler(factory):
    """A factory of something else is refused with what it gave, when there are groups."""
    with pytest.raises(af.errors.ArgumentError, match=r"returned \w+.*LRScheduler"):
        on_groups(factory, 0.1, 0.1)


@pytest.mark.parametrize("factory", [None, 0.1, "StepLR"])
def test_from_torch_takes_a_factory(factory):
    """What cannot be called is refused at once."""
    with pytest.raises(af.errors.ArgumentError, match="expected a function that takes"):
        schedules.from_torch(factory)


def test_from_torch_refuses_another_optimizer_s():
    """A1: a scheduler on another optimizer, whose rates would never move, is refused."""
    mine = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=0.1)
    with pytest.raises(af.errors.ArgumentError, match="for another optimizer"):
        on_groups(lambda _: HALVE(mine), 0.1, 0.1)


def test_from_torch_refuses_groups_that_do_not_fit():
    """A factory that fails on the state's groups is told with their number, by `create`."""
    cycle = partial(lr_scheduler.OneCycleLR, max_lr=[0.1] * 3, total_steps=20)
    with pytest.raises(
        af.errors.ArgumentError, match="SGD .parameter groups: 2.: ValueError: max_lr"
    ):
        on_groups(cycle, 0.1, 0.1)


def test_from_torch_refuses_what_reads_the_optimizer():
    """A scheduler that looks at the optimizer's state is no function of the update."""

    class Looks(lr_scheduler.LRScheduler):
        def get_lr(self):
            group = self.optimizer.param_groups[0]
            return [self.optimizer.state[group["params"][0]]["step"]]

    with pytest.raises(af.errors.ArgumentError, match="reads the optimizer's state"):
        on_groups(Looks, 0.1, 0.1)


def test_from_torch_is_no_factor():
    """Called, or joined, it says what to do: it has rates of groups, and no factors."""
    halve = schedules.from_torch(HALVE)
    with pytest.raises(af.errors.ArgumentError, match=r"state\.lrs"):
        halve(3)
    for parts in ([(3, halve), schedules.constant()], [(3, lambda _: 1.0), halve]):
        with pytest.raises(af.errors.ArgumentError, match="SequentialLR"):
            schedules.join(*parts)


def test_from_torch_of_a_partition():
    """The groups of a partition are numbered through; momenta of two kinds are refused."""
    optimizer = af.combine_optimizers(
        (lambda name, _: name == "bias", partial(torch.optim.Adagrad, lr=0.5)),
        (..., partial(torch.optim.SGD, lr=0.25, momentum=0.9)),
    )
    make = partial(
        af.TrainState.create, model=lambda: torch.nn.Linear(2, 1), optimizer=optimizer
    )
    factors = [lambda step: 1 / (1 + step), lambda step: 2.0**-step]
    schedule = schedules.from_torch(partial(lr_scheduler.LambdaLR, lr_lambda=factors))
    state = make(schedule=schedule)
    step = af.make_step(lambda model, batch: model(batch).mean())
    state, _ = step(state, torch.ones(2, 2))
    state, _ = step(state, torch.ones(2, 2))
    assert state.lrs == (0.5 / 3, 0.25 / 4)
    cycle = partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=9)
    with pytest.raises(af.errors.ArgumentError, match="cycle_momentum"):
        make(schedule=schedules.from_torch(cycle))


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


BAD = {
    "linear nan": lambda: schedules.linear(3, start=math.nan),
    "linear inf": lambda: schedules.linear(3, end=math.inf),
    "constant negative": lambda: schedules.constant(-0.1),
    "constant text": lambda: schedules.constant("1"),
    "cosine all warm-up": lambda: schedules.warmup_cosine(3, 3),
    "cosine end": lambda: schedules.warmup_cosine(1, 3, end=-1.0),
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
    with pytest.raises(af.errors.ArgumentError, match=rf"schedules\.{name}"):
        BAD[case]()


def make(schedule):
    """Return a small state with a schedule."""
    return linear_state(
        2, optimizer=partial(torch.optim.SGD, lr=0.5), schedule=schedule
    )


def test_schedule_is_a_function():
    """Something that cannot be called is refused when the state is created."""
    with pytest.raises(af.errors.ArgumentError, match=r"schedule=0\.1.*af\.schedules"):
        make(0.1)


@pytest.mark.parametrize("factor", [math.nan, math.inf, None, "1"])
def test_schedule_that_gives_no_factor(factor):
    """A factor that is no finite number is refused before the update."""
    state = make(lambda _: factor)
    before = {name: param.clone() for name, param in state.params.items()}
    step = af.make_step(lambda model, batch: model(batch).mean())
    with pytest.raises(af.errors.Error, match="schedule"):
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


@given(num_warmup=st.integers(0, 50), num_more=st.integers(1, 50))
def test_a_warm_up_is_a_straight_line(num_warmup, num_more):
    """It rises by equal steps, from the first update on, to 1 at the first update after it."""
    factor = schedules.warmup_cosine(num_warmup, num_warmup + num_more)
    line = [i / (num_warmup + 1) for i in range(1, num_warmup + 2)]
    assert [factor(i) for i in range(num_warmup + 1)] == pytest.approx(line, rel=1e-12)


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


@pytest.mark.parametrize(
    "make", [lambda: itertools.count(1).__next__, lambda: partial(random.gauss, 0, 1)]
)
def test_a_schedule_that_counts_its_calls_or_draws_is_refused(make):
    """A run could not be resumed, and every look at a rate would change the next."""
    number = make()
    with pytest.raises(
        af.errors.ArgumentError, match=r"for update 0, and .* called again"
    ):
        linear_state(schedule=lambda _: number())


def test_a_schedule_may_give_no_number_or_raise():
    """The step says so, of the update at which it does."""
    for bad in (lambda _: math.nan, lambda _: 1 / 0, lambda _: object()):
        linear_state(schedule=bad)
