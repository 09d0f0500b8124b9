# SPDX-License-Identifier: Apache-2.0
"""A torch scheduler as a schedule sets what it sets when it is stepped by hand, bitwise."""

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler, swa_utils

import accelfn as af
from accelfn.testing import quantities, simulate
from tests.internals import Update
from tests.laws.torch_schedulers import (
    SCHEDULERS,
    TORCH,
    TRANSFORMERS_WITH_METRIC,
    WITH_METRIC,
    Factory,
)
from tests.laws.worlds import DDP, Found, single
from tests.strategies import differences, model, tensors

ROWS = torch.linspace(-1, 1, 36, dtype=torch.float64).view(12, 3)
KINDS: dict[str, tuple[Any, bool]] = {
    "sgd": (partial(torch.optim.SGD, momentum=0.5), True),
    "adam": (torch.optim.Adam, True),
    "adamw": (torch.optim.AdamW, True),
    "fused": (partial(torch.optim.AdamW, fused=True), True),
    "rmsprop": (torch.optim.RMSprop, True),
    "adagrad": (torch.optim.Adagrad, False),
}
"""Optimizers, and whether they have a momentum, or betas."""


@attrs.frozen
class Given:
    """An optimizer in groups of its own rates, and a scheduler that goes with it."""

    kind: str
    rates: tuple[float, ...]
    tensor: bool
    scheduler: Factory

    def optimizer(self, named: Sequence[tuple[str, nn.Parameter]]) -> Any:
        count = len(self.rates)
        groups = [
            {
                "params": named[i::count],
                "lr": torch.tensor(rate) if self.tensor else rate,
                "weight_decay": 0.01 * i,
            }
            for i, rate in enumerate(self.rates)
        ]
        return KINDS[self.kind][0](groups)

    def state(self, world: af.World | None = None, **more: Any) -> af.TrainState:
        return af.TrainState.create(
            model=model("plain"),
            optimizer=self.optimizer,
            schedule=af.schedules.from_torch(self.scheduler),
            world=world or single(),
            **more,
        )


@st.composite
def givens(
    draw: st.DrawFn, kinds: Iterable[str] = KINDS, names: Iterable[str] = SCHEDULERS
) -> Given:
    kind = draw(st.sampled_from(sorted(kinds)))
    rates = draw(st.lists(st.sampled_from([0.1, 0.03, 3e-4]), min_size=1, max_size=3))
    row = SCHEDULERS[draw(st.sampled_from(sorted(names)))]
    tensor = kind in ("sgd", "fused") and draw(st.booleans())
    return Given(kind, tuple(rates), tensor, draw(row(len(rates), KINDS[kind][1])))


def loss_fn(net: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return net(rows).square().mean()


def by_hand(
    given: Given, batches: list[torch.Tensor], skipped: list[bool]
) -> list[tuple[tuple[float, ...], Any, Found]]:
    """Return the rates, the other options and the parameters before each update."""
    with af.borrow_model(given.state().copy()) as net:
        optimizer = given.optimizer(list(net.named_parameters()))
        scheduler = given.scheduler(optimizer)
        seen = []
        for batch, skips in zip(batches, skipped, strict=True):
            rates = tuple(float(group["lr"]) for group in optimizer.param_groups)
            params = {n: p.detach().clone() for n, p in net.named_parameters()}
            seen.append((rates, quantities(net, optimizer)["hyper"], params))
            if skips:
                continue
            loss_fn(net, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    return seen


@given(given=givens(), skipped=st.lists(st.booleans(), min_size=1, max_size=11))
def test_from_torch_is_the_scheduler_stepped(given: Given, skipped: list[bool]) -> None:
    """A1: rates and parameters are bitwise the real scheduler's; a skipped update steps nothing."""
    check_steps(given, skipped)


CYCLED = {name for name, (_, cycles) in KINDS.items() if cycles}


@given(
    given=givens(CYCLED, ["CyclicLR", "OneCycleLR"]),
    skipped=st.lists(st.booleans(), min_size=2, max_size=11),
)
def test_momenta_are_cycled(given: Given, skipped: list[bool]) -> None:
    """A2: a scheduler that cycles momenta, or betas, does so in the real optimizer."""
    check_steps(given, skipped)


def check_steps(given: Given, skipped: list[bool]) -> None:
    """Train beside the loop by hand, and compare all before each update."""
    batches = [ROWS + i / 16 for i in range(len(skipped))]
    expected = by_hand(given, batches, skipped)
    state = given.state(setup=af.skip_nonfinite(max_consecutive=20))
    step = af.make_step(loss_fn)
    for batch, skips, (rates, hyper, params) in zip(
        batches, skipped, expected, strict=True
    ):
        assert rates == state.lrs
        assert repr(hyper) == repr(quantities(state)["hyper"])
        assert differences(params, dict(state.params)) == []
        state, _ = step(state, batch * float("nan") if skips else batch)


@given(given=givens(), order=st.permutations(range(9)))
def test_any_update_can_be_asked_for(given: Given, order: list[int]) -> None:
    """A1: the rates of an update do not depend on which were asked for before."""
    inorder = given.state()
    expected = [attrs.evolve(inorder, step=step).lrs for step in range(9)]
    state = given.state()
    actual = {step: attrs.evolve(state, step=step).lrs for step in order}
    assert expected == [actual[step] for step in range(9)]


class Broken:
    """A scheduler's `step` that breaks once, before, in the middle of, or behind its work."""

    def __init__(
        self, scheduler: Any, at: int, where: str, error: BaseException
    ) -> None:
        self.scheduler, self.step, self.error = scheduler, scheduler.step, error
        self.left, self.where = at, where
        scheduler.step = self

    def __call__(self) -> None:
        self.left -= 1
        if self.left != 0:
            self.step()
        elif self.where == "wrong rate":
            self.scheduler.optimizer.param_groups[-1]["lr"] = self.error.args[0]
        else:
            if self.where == "behind":
                self.step()
            raise self.error


@given(
    given=givens(),
    at=st.integers(1, 6),
    where=st.sampled_from(["before", "behind", "wrong rate"]),
    interrupted=st.booleans(),
    later=st.lists(st.integers(0, 8), min_size=1, max_size=4),
)
def test_an_error_is_told_again_or_costs_nothing(given, at, where, interrupted, later):
    """A1: a scheduler's error is raised again at each later ask; an interrupt costs nothing."""
    broken: list[Broken] = []
    error = KeyboardInterrupt("stop") if interrupted else ValueError("boom")

    def breaks(optimizer: Any) -> Any:
        scheduler = given.scheduler(optimizer)
        if not broken and armed:
            broken.append(Broken(scheduler, at, where, error))
        return scheduler

    def lrs(state: af.TrainState, update: int) -> tuple[float, ...] | str:
        try:
            return attrs.evolve(state, step=update).lrs
        except af.errors.ArgumentError as told:
            return str(told)

    if interrupted and where == "wrong rate":
        return
    armed = False
    expected = [lrs(given.state(), update) for update in range(9)]
    armed = True
    state = attrs.evolve(given, scheduler=breaks).state()
    if interrupted:
        with pytest.raises(KeyboardInterrupt):
            lrs(state, 8)
    else:
        said = lrs(state, 8)
        assert isinstance(said, str)
        assert f"has no learning rate for update {at}: " in said
        expected[at:] = [said] * (9 - at)
    assert [expected[update] for update in later] == [lrs(state, u) for u in later]
    assert expected == [lrs(state, update) for update in range(9)]


@given(
    given=givens(),
    size=st.integers(1, 2),
    cut=st.integers(0, 4),
    exact=st.sampled_from([DDP, af.chain(DDP, af.accumulate(num_micro_batches=2))]),
)
def test_from_torch_over_ranks_and_cuts(given, size, cut, exact):
    """A1: on ranks, and after a resume at any update, the rates are the scheduler's own."""
    expected = [rates for rates, _, _ in by_hand(given, [ROWS] * 6, [False] * 6)]

    def train(world: af.World, folder: Path) -> tuple[Found, Found]:
        def taken(state: af.TrainState, updates: int) -> af.TrainState:
            step = af.make_step(loss_fn)
            for batch in af.batches(state, until_epoch=2):
                if state.step == updates:
                    break
                assert expected[state.step] == state.lrs
                state, _ = step(state, batch)
            return state

        fresh = partial(
            given.state, world, setup=exact, data=af.Data(ROWS, global_batch_size=4)
        )
        state = taken(fresh(), cut)
        af.save(state, folder / "saved")
        loaded = af.load(fresh(), folder / "saved")
        return tensors(taken(state, 5)), tensors(taken(loaded, 5))

    with tempfile.TemporaryDirectory() as folder:
        for one, two in simulate(size, lambda world: train(world, Path(folder))):
            assert differences(one, two) == []


@given(one=givens(), other=givens(), turns=st.lists(st.booleans(), max_size=14))
def test_states_that_share_one_do_not_meet(one, other, turns):
    """A1: one from_torch may be the schedule of two states with optimizers of their own."""
    other = attrs.evolve(
        other, rates=other.rates[:1] * len(one.rates), scheduler=one.scheduler
    )
    if KINDS[one.kind][1] and not KINDS[other.kind][1]:
        other = attrs.evolve(other, kind=one.kind)
    schedule = af.schedules.from_torch(one.scheduler)
    expected = [
        [rates for rates, _, _ in by_hand(each, [ROWS] * 8, [False] * 8)]
        for each in (one, other)
    ]
    states = [
        af.TrainState.create(
            model=model("plain"), optimizer=each.optimizer, schedule=schedule
        )
        for each in (one, other)
    ]
    step = af.make_step(loss_fn)
    for turn in turns:
        if states[turn].step < 8:
            assert expected[turn][states[turn].step] == states[turn].lrs
            states[turn], _ = step(states[turn], ROWS)


@given(given=givens(), updates=st.integers(1, 5))
def test_from_torch_in_backward(given: Given, updates: int) -> None:
    """A2: an optimizer that steps in the backward pass finds the same rates and momenta."""
    plain, backward = given.state(), given.state(setup=af.optimizer_in_backward())
    step = af.make_step(loss_fn)
    for i in range(updates):
        plain, _ = step(plain, ROWS + i / 16)
        backward, _ = step(backward, ROWS + i / 16)
    assert differences(tensors(plain), tensors(backward)) == []


@af.transform
class Sets:
    """Sets hyperparameters to numbers."""

    values: dict[Any, Any]

    def hyper(self, hyper: Mapping[Any, Any], slot: None, update: Update) -> Any:
        return self.values, slot


@given(given=givens(), rate=st.sampled_from([0.0, 0.25]), whole=st.booleans())
def test_hyper_has_the_last_word(given: Given, rate: float, whole: bool) -> None:
    """What a transform sets replaces what the schedule does, and `lrs` says so."""
    values = {"lr": rate} if whole else {(0, "lr"): rate}
    state = given.state(setup=Sets(values))
    scheduled = given.state().lrs
    expected = [rate] * len(scheduled) if whole else [rate, *scheduled[1:]]
    assert expected == list(state.lrs)
    assert expected == quantities(state)["lr"]


def test_every_scheduler_is_drawn():
    """A1: of torch's and Transformers' schedulers, each is drawn or wants a metric."""
    from transformers import optimization

    torchs = {
        name
        for module in (lr_scheduler, swa_utils)
        for name in module.__all__
        if isinstance(getattr(module, name), type)
        and issubclass(getattr(module, name), lr_scheduler.LRScheduler)
    }
    assert set(TORCH) | WITH_METRIC == torchs - {"LRScheduler"}
    theirs = {each.value for each in optimization.SchedulerType}
    assert set(SCHEDULERS) - set(TORCH) | TRANSFORMERS_WITH_METRIC == theirs


@pytest.mark.parametrize("name", sorted(TRANSFORMERS_WITH_METRIC))
def test_what_follows_a_metric_is_refused(name):
    """Schedulers of Transformers that read a metric are refused: `af.reduce_lr_on_plateau`."""
    from transformers import get_scheduler

    given = Given("sgd", (0.1,), tensor=False, scheduler=partial(get_scheduler, name))
    with pytest.raises(
        af.errors.ArgumentError, match=r"metrics.*af\.reduce_lr_on_plateau"
    ):
        given.state()
