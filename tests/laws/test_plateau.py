# SPDX-License-Identifier: Apache-2.0
"""`plateau` is torch's ReduceLROnPlateau, as a value that is saved with the state."""

import math
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import accelfn as af
from accelfn.testing import simulate
from tests.laws.worlds import DDP, Found, single
from tests.strategies import differences, model, tensors

ROWS = torch.linspace(-1, 1, 36, dtype=torch.float64).view(12, 3)
VALUES = st.sampled_from([1.0, 0.9, 0.89, -1.0, math.inf, math.nan])


@attrs.frozen
class Given:
    """Options that torch's and accelfn's have alike, and rates of parameter groups."""

    options: dict[str, Any]
    rates: tuple[float, ...]
    tensor: bool

    def optimizer(self, named: Any) -> torch.optim.Optimizer:
        count = len(self.rates)
        groups = [
            {
                "params": named[i::count],
                "lr": torch.tensor(rate) if self.tensor else rate,
            }
            for i, rate in enumerate(self.rates)
        ]
        return torch.optim.SGD(groups, momentum=0.5)

    def state(self, world: af.World | None = None, *setup: Any) -> af.TrainState:
        return af.TrainState.create(
            model=model("plain"),
            optimizer=self.optimizer,
            setup=af.chain(*setup, af.reduce_lr_on_plateau(**self.options)),
            data=af.Data(ROWS, global_batch_size=4),
            world=world or single(),
        )


@st.composite
def givens(draw: st.DrawFn) -> Given:
    rates = draw(st.lists(st.sampled_from([0.1, 0.03, 3e-4]), min_size=1, max_size=3))
    floors = st.sampled_from([0.0, 0.02])
    each = st.lists(floors, min_size=len(rates), max_size=len(rates))
    options = st.fixed_dictionaries(
        {"patience": st.integers(0, 2), "min_lr": each | floors},
        optional={
            "factor": st.sampled_from([0.0, 0.1, 0.3, 0.7]),
            "mode": st.sampled_from(["min", "max"]),
            "threshold": st.sampled_from([0.0, 1e-4, 0.1, 1.0]),
            "threshold_mode": st.sampled_from(["rel", "abs"]),
            "cooldown": st.integers(0, 2),
            "eps": st.sampled_from([0.0, 1e-8, 0.01]),
        },
    )
    return Given(draw(options), tuple(rates), draw(st.booleans()))


def loss_fn(net: torch.nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return net(rows).square().mean()


def at_the_bar(mode: str) -> Given:
    """Return options by which the same value again is no better."""
    options = {"patience": 0, "min_lr": 0.0, "threshold": 0.0, "mode": mode}
    return Given(options, (0.1,), tensor=False)


@given(given=givens(), values=st.lists(VALUES, max_size=16))
@example(given=at_the_bar("min"), values=[1.0, 1.0])
@example(given=at_the_bar("max"), values=[1.0, 1.0])
def test_plateau_is_torchs(given: Given, values: list[float]) -> None:
    """Rates and parameters are bitwise those of ReduceLROnPlateau on the same values."""
    state = attrs.evolve(given.state(), cursor=af.typing.Cursor(0, 4))
    step = af.make_step(loss_fn)
    with af.borrow_model(state.copy()) as net:
        optimizer = given.optimizer(list(net.named_parameters()))
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, **given.options
        )
        for i, value in enumerate(values):
            loss_fn(net, ROWS + i / 16).backward()
            optimizer.step()
            optimizer.zero_grad()
            state, _ = step(state, ROWS + i / 16)
            slot = state.slots["reduce_lr_on_plateau"]  # after all values but this one
            assert scheduler.num_bad_epochs == slot["num_bad"]
            assert scheduler.cooldown_counter == slot["cooling"]
            scheduler.step(value)
            state = af.report_metric(state, value)
            rates = tuple(float(group["lr"]) for group in optimizer.param_groups)
            assert rates == state.lrs
        expected = {name: p.detach() for name, p in net.named_parameters()}
        assert differences(expected, dict(state.params)) == []


@given(
    given=givens(),
    values=st.lists(VALUES, min_size=5, max_size=5),
    size=st.integers(1, 2),
    cut=st.integers(0, 4),
)
def test_what_was_reported_is_saved(given, values, size, cut):
    """Cut at any update and resumed, on any number of ranks, it goes on bitwise."""

    def train(world: af.World, folder: Path) -> tuple[Found, Found]:
        def taken(state: af.TrainState, updates: int) -> af.TrainState:
            step = af.make_step(loss_fn)
            for batch in af.batches(state, until_epoch=2):
                if state.step == updates:
                    break
                state, _ = step(state, batch)
                state = af.report_metric(state, values[state.step - 1])
            return state

        state = taken(given.state(world, DDP), cut)
        af.save(state, folder / "saved")
        loaded = af.load(given.state(world, DDP), folder / "saved")
        one, two = taken(state, 5), taken(loaded, 5)
        assert one.lrs == two.lrs
        assert repr(one.slots) == repr(two.slots)
        return tensors(one), tensors(two)

    with tempfile.TemporaryDirectory() as folder:
        for one, two in simulate(size, lambda world: train(world, Path(folder))):
            assert differences(one, two) == []


@given(
    given=givens(),
    values=st.lists(VALUES, max_size=8),
    factors=st.lists(st.sampled_from([1.0, 0.5, 0.0]), min_size=1, max_size=4),
)
def test_plateau_reduces_what_is_scheduled(given, values, factors):
    """Beside a schedule, an update takes the schedule's rate, reduced as often as it stalled."""
    alone = given.state()
    for value in values:
        alone = af.report_metric(alone, value)
    for i, factor in enumerate(factors):
        rates = tuple(rate * factor for rate in given.rates)
        lower = attrs.evolve(given, rates=rates, tensor=False).state()
        expected = attrs.evolve(lower, slots=dict(alone.slots)).lrs
        state = af.TrainState.create(
            model=model("plain"),
            optimizer=attrs.evolve(given, tensor=False).optimizer,
            schedule=lambda step: factors[step],
            setup=af.reduce_lr_on_plateau(**given.options),
        )
        state = attrs.evolve(state, slots=dict(alone.slots), step=i)
        assert expected == state.lrs


@af.transform
class Summing:
    """Takes the sum of all ranks' gradients itself."""

    def reduce(self, grads, slot, update):
        sums = [af.all_reduce(each, update.world) for each in grads.sums.values()]
        weight = af.all_reduce(torch.tensor(float(grads.weight)), update.world)
        return grads.with_sums(dict(zip(grads.sums, sums, strict=True)), weight), slot


TOGETHER = {
    "ddp": DDP,
    "local": af.chain(af.shard_data(), af.local_sgd(sync_every=2)),
    "own": af.chain(af.shard_data(), Summing()),
}


@given(
    given=givens(),
    values=st.lists(VALUES, min_size=2, max_size=2),
    size=st.integers(2, 3),
    by=st.sampled_from(sorted(TOGETHER)),
)
def test_ranks_report_the_same(given, values, size, by):
    """Where ranks train together, one that reports another value is named, on all."""

    def rank(world: af.World) -> str:
        state = given.state(world, TOGETHER[by])
        try:
            af.report_metric(state, values[0 if world.rank == 0 else 1])
        except af.errors.ReplicaMismatchError as error:
            return str(error)
        return ""

    said = simulate(size, rank).results
    same = repr(values[0]) == repr(values[1])
    assert [not same] * size == ["reported value" in each for each in said]


def test_ranks_apart_report_their_own():
    """Where nothing crosses ranks, each may go by what it measures itself."""

    def rank(world: af.World) -> tuple[float, ...]:
        state = af.TrainState.create(
            model=model("plain"),
            optimizer=partial(torch.optim.SGD, lr=1.0),
            setup=af.reduce_lr_on_plateau(0.5, patience=0),
            world=world,
        )
        for _ in range(1 + world.rank):
            state = af.report_metric(state, 1.0)
        return state.lrs

    assert list(simulate(2, rank)) == [(1.0,), (0.5,)]
