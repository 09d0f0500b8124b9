# SPDX-License-Identifier: Apache-2.0
"""Optimizers made of several, frozen in part, or schedule-free, are torch's own at work."""

import copy
import tempfile
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
import schedulefree
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import accelfn as af
from accelfn.testing import simulate
from tests.laws.worlds import DDP, Found, single
from tests.strategies import OPTIMIZERS, Run, differences, model, runs, tensors

sizes = st.sampled_from([1, 2])
SETUPS = [
    af.chain(DDP, af.clip_grad_norm(0.5), af.ema(0.5)),
    af.chain(DDP, af.accumulate(num_micro_batches=2)),
    af.chain(af.shard_data(), af.local_sgd(sync_every=1, opt_state=True)),
]
setups = st.sampled_from(SETUPS)
PARTS = {
    "muon": partial(torch.optim.Muon, lr=0.25),
    "momentum": OPTIMIZERS["momentum"],
    "adamw": OPTIMIZERS["adamw"],
}
ROWS = torch.linspace(-1, 1, 18, dtype=torch.float64).view(6, 3)


RATES = {torch.optim.Muon: 0.25, torch.optim.SGD: 0.25, torch.optim.AdamW: 0.05}


def is_matrix(_name: str, param: torch.Tensor) -> bool:
    return param.ndim == 2


def muon_and(rest: str) -> af.combine_optimizers:
    """Return Muon for matrices, and another optimizer for the rest."""
    return af.combine_optimizers((is_matrix, PARTS["muon"]), (..., PARTS[rest]))


def halves(names: frozenset[str], make: Callable[..., object]) -> af.combine_optimizers:
    """Return one optimizer twice, each for some of the parameters, or once for all."""
    if "head.weight" in names or "head.bias" not in names:
        return af.combine_optimizers((..., make))
    return af.combine_optimizers((lambda name, _: name in names, make), (..., make))


def made(run: Run, optimizer: object, setup: object, world: af.World) -> af.TrainState:
    """Return the first state of a run with another optimizer."""
    plain = run.state(world)
    state = af.TrainState.create(
        model=model(run.kind),
        optimizer=optimizer,
        schedule=plain.schedule,
        data=plain.data,
        world=world,
        seed=run.seed,
    )
    return state.with_params(plain.params).with_setup(setup)


names = st.frozensets(
    st.sampled_from(["first.weight", "first.bias", "head.weight", "head.bias"])
)


@given(run=runs(), size=sizes, setup=setups, half=names)
def test_equal_parts_are_one_optimizer(run, size, setup, half):
    """Parts of one kind and options are one optimizer, however parameters are divided."""
    make = OPTIMIZERS[run.optimizer]

    def train(world: af.World, optimizer: object) -> Found:
        return tensors(run.train(made(run, optimizer, setup, world))[0])

    whole = simulate(size, lambda world: train(world, make))
    parted = simulate(size, lambda world: train(world, halves(half, make)))
    for one, two in zip(whole, parted, strict=True):
        assert differences(one, two) == []


def by_hand(net: nn.Module, rest: str, factors: Sequence[float]) -> Found:
    """Return what a loop with two torch optimizers makes of a model."""
    named = list(net.named_parameters())
    muon = PARTS["muon"]([(n, p) for n, p in named if p.ndim == 2])
    other = PARTS[rest]([(n, p) for n, p in named if p.ndim != 2])
    for i, factor in enumerate(factors):
        for each in (muon, other):
            each.param_groups[0]["lr"] = RATES[type(each)] * factor
        net(ROWS + i).square().mean().backward()
        for each in (muon, other):
            each.step()
            each.zero_grad()
    return {name: param.detach().clone() for name, param in named}


@given(
    rest=st.sampled_from(["momentum", "adamw"]),
    factors=st.lists(st.sampled_from([1.0, 0.5, 2.0, 0.0]), min_size=1, max_size=4),
    seed=st.integers(0, 3),
)
def test_each_part_is_its_own_optimizer(rest, factors, seed):
    """Muon for matrices and another for the rest are the two stepped by hand, at any rate."""
    state = af.TrainState.create(
        model=model("plain"),
        seed=seed,
        optimizer=muon_and(rest),
        schedule=lambda step: factors[step],
        world=single(),
    )
    with af.borrow_model(state.copy(), at="train") as net:
        expected = by_hand(net, rest, factors)
    step = af.make_step(lambda net, x: net(x).square().mean())
    for i in range(len(factors)):
        state, _ = step(state, ROWS + i)
    assert differences(expected, dict(state.params)) == []


@given(
    run=runs(kind="plain", n=9, batch_size=3),
    rest=st.sampled_from(["momentum", "adamw"]),
    size=sizes,
    setup=setups,
    cut=st.integers(0, 2),
)
def test_parts_are_saved_and_copied(run, rest, size, setup, cut):
    """A partition copied, or saved and loaded, at any update goes on as if it had not been."""

    def train(world: af.World, folder: Path) -> tuple[Found, Found]:
        state, _ = run.train(made(run, muon_and(rest), setup, world), cut)
        af.save(state, folder / "saved")
        fresh = made(run, muon_and(rest), setup, world)
        loaded = af.load(fresh, folder / "saved")
        fork = state.copy()
        state, _ = run.train(state, 2)
        expected = tensors(state)
        run.train(fork, 2)
        return expected, tensors(run.train(loaded, 2)[0])

    with tempfile.TemporaryDirectory() as folder:
        for one, two in simulate(size, lambda world: train(world, Path(folder))):
            assert differences(one, two) == []


some = names.filter(lambda found: 0 < len(found) < 4)


@given(one=some, other=some, make=st.sampled_from(["momentum", "adamw"]))
def test_parts_take_no_other_parts_state(one, other, make):
    """A partition refuses a checkpoint of one whose parts have other parameters."""
    run = Run(optimizer=make)

    def parts(mine: frozenset[str]) -> af.combine_optimizers:
        is_mine = lambda name, _: name in mine  # noqa: E731
        return af.combine_optimizers((is_mine, PARTS[make]), (..., PARTS[make]))

    state, fresh = (made(run, parts(mine), None, single()) for mine in (one, other))
    state, _ = run.train(state, 1)
    with tempfile.TemporaryDirectory() as folder:
        af.save(state, f"{folder}/saved")
        if one == other:
            af.load(fresh, f"{folder}/saved")
            return
        with pytest.raises(
            af.errors.CheckpointError, match=r"partition\(.* parameters"
        ):
            af.load(fresh, f"{folder}/saved")


masks = st.lists(names.filter(bool), min_size=1, max_size=4)


@given(optimizer=st.sampled_from(["sgd", "momentum", "adamw", "decay"]), masks=masks)
def test_freezing_is_requires_grad(optimizer: str, masks: list[frozenset[str]]) -> None:
    """Training what a predicate says is a loop by hand that sets `requires_grad` so."""
    state = af.TrainState.create(model=model("plain"), optimizer=OPTIMIZERS[optimizer])
    step = af.make_step(lambda net, x: net(x).square().mean())
    with af.borrow_model(state, at="train") as lent:
        net = copy.deepcopy(lent)
    torchs = OPTIMIZERS[optimizer](list(net.named_parameters()))
    for i, mask in enumerate(masks):
        for name, param in net.named_parameters():
            param.requires_grad_(name in mask)
        net(ROWS + i).square().mean().backward()
        torchs.step()
        torchs.zero_grad()
    expected = {name: p.detach().clone() for name, p in net.named_parameters()}
    for i, mask in enumerate(masks):
        state = state.with_trainable(lambda name, _, mask=mask: name in mask)
        state, _ = step(state, ROWS + i)
    assert differences(expected, dict(state.params)) == []


@given(run=runs(kind="plain"), mask=names.filter(bool), other=names.filter(bool))
def test_a_checkpoint_is_of_no_trained_set(run, mask, other):
    """`load` keeps the given state's trained set; it warns unless that is the saved one."""
    saved, _ = run.train(run.state().with_trainable(lambda name, _: name in mask))
    fresh = run.state().with_trainable(lambda name, _: name in other)
    with tempfile.TemporaryDirectory() as folder:
        af.save(saved, Path(folder) / "saved")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loaded = af.load(fresh, Path(folder) / "saved")
        warned = [str(each.message) for each in caught]
        af.load(fresh, Path(folder) / "saved", allow=("trainable",))  # warns of nothing
    assert [mask != other] == ["with_trainable" in each for each in warned or [""]]
    assert differences(tensors(saved), tensors(loaded)) == []
    thawed = saved.with_trainable(lambda name, _: name in other)
    one, two = (tensors(run.train(each)[0]) for each in (thawed, loaded))
    assert differences(one, two) == []


FREE = {
    "adamw": partial(schedulefree.AdamWScheduleFree, lr=0.1, weight_decay=0.1),
    "warm": partial(schedulefree.AdamWScheduleFree, lr=0.1, warmup_steps=3),
    "sgd": partial(schedulefree.SGDScheduleFree, lr=0.1, weight_decay=0.1),
    "radam": partial(schedulefree.RAdamScheduleFree, lr=0.1, silent_sgd_phase=False),
}


@pytest.mark.parametrize("kind", sorted(FREE))
@given(updates=st.integers(0, 6), seed=st.integers(0, 3))
def test_schedule_free_is_its_own_modes(kind: str, updates: int, seed: int) -> None:
    """Steps are those of the training mode, what is evaluated that of the evaluation mode."""
    state = af.TrainState.create(
        model=model("plain"),
        seed=seed,
        optimizer=FREE[kind],
        setup=af.schedule_free(),
        world=single(),
    )
    step = af.make_step(lambda net, x: net(x).square().mean())
    with af.borrow_model(state.copy(), at="train") as net:
        torchs = FREE[kind](list(net.named_parameters()))
        torchs.train()
        for i in range(updates):
            net(ROWS + i).square().mean().backward()
            torchs.step()
            torchs.zero_grad()
            state, _ = step(state, ROWS + i)
            af.eval_params(state)  # looking changes nothing
        assert differences(dict(net.named_parameters()), dict(state.params)) == []
        torchs.eval()
        looked = dict(af.eval_params(state))
        assert differences(dict(net.named_parameters()), looked) == []
