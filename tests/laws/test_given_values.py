# SPDX-License-Identifier: Apache-2.0
"""A state that is given values from outside of a step: it begins, or goes on, with all of them."""

import tempfile
import warnings
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import schedulefree
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import accelfn as af
from accelfn.errors import AccelfnWarning, ReplicaMismatchError
from accelfn.testing import simulate
from tests.laws.worlds import DDP, single
from tests.strategies import differences, tensors

X = torch.linspace(-1, 1, 48, dtype=torch.float64).view(16, 3)
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.5)
FREE = partial(schedulefree.AdamWScheduleFree, lr=0.1)
SETUPS = {
    "ema": (af.chain(DDP, af.ema(0.5)), SGD),
    "two averages": (af.chain(DDP, af.ema(0.5), af.ema(0.9, name="slow")), SGD),
    "schedule_free": (af.chain(DDP, af.schedule_free()), FREE),
    "diloco": (af.chain(af.shard_data(), af.diloco(sync_every=2)), SGD),
    "diloco in few bits": (
        af.chain(af.shard_data(), af.diloco(sync_every=2, bits=8, delay=1)),
        SGD,
    ),
    "PowerSGD": (
        af.chain(DDP, af.compress_grads("powersgd", start_powerSGD_iter=1)),
        SGD,
    ),
}


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return (model(batch) - batch.sum(1, keepdim=True)).square().mean()


STEP = af.make_step(loss)


def created(world, setup, model=net, seed=0):
    transforms, optimizer = SETUPS[setup]
    return af.TrainState.create(
        model=model,
        optimizer=optimizer,
        data=af.Data(X, global_batch_size=8),
        setup=transforms,
        world=world,
        seed=seed,
    )


def trained(state: af.TrainState, updates: int) -> af.TrainState:
    for batch in islice(af.batches(state, until_epoch=9), updates):
        state, _ = STEP(state, batch)
    return state


def by_bind(state, values, _):
    with af.borrow_model(state, at="train") as model:
        model.load_state_dict(dict(values))
    return state


def by_load_part(state, _, folder, name="other"):
    return af.load_part(state, Path(folder) / name, "params").state


WAYS = {
    "with_params": lambda state, values, _: state.with_params(values),
    "bind": by_bind,
    "load_part": by_load_part,
}


@pytest.mark.parametrize("way", WAYS)
@given(setup=st.sampled_from(sorted(SETUPS)), size=st.sampled_from([1, 2]))
def test_a_state_begins_with_what_it_is_given(way, setup, size):
    """Before the first update it is the state that was created with these parameters."""

    def fn(world):
        other = created(world, setup, seed=1)
        af.save(other, Path(folder) / "other")
        values = {name: each.clone() for name, each in other.params.items()}

        def made_of_them():
            model = net()
            model.load_state_dict(values)
            return model

        given = WAYS[way](created(world, setup), values, folder)
        whole = created(world, setup, made_of_them)
        for updates in (0, 3):
            one, two = trained(given, updates), trained(whole, updates)
            assert differences(tensors(two), tensors(one)) == []
            seen = (dict(af.eval_params(each)) for each in (two, one))
            assert differences(*seen) == []
            if not updates:
                given, whole = one, two

    with tempfile.TemporaryDirectory() as folder:
        simulate(size, fn)


@given(setup=st.sampled_from(["ema", "diloco", "diloco in few bits"]))
def test_what_has_come_further_goes_on_and_is_told(setup):
    """In mid-run slots stay; of parameters of a file alone a warning says so."""

    def fn(world):
        state, other = trained(created(world, setup), 1), created(world, setup, seed=1)
        slots = {name: each for name, each in tensors(state).items() if "slots" in name}
        af.save(other, Path(folder) / "other")
        with pytest.warns(AccelfnWarning, match=r"load_part: .* no longer fit them"):
            loaded = by_load_part(state, None, folder)
        for found in (loaded, state.with_params(other.params)):
            there = tensors(found)
            assert differences(slots, {name: there[name] for name in slots}) == []
            assert differences(dict(other.params), dict(found.params)) == []
        with warnings.catch_warnings(action="error", category=AccelfnWarning):
            both = "params", "slots"
            whole = af.load_part(state, Path(folder) / "other", both).state
        assert (
            differences(dict(af.eval_params(other)), dict(af.eval_params(whole))) == []
        )

    with tempfile.TemporaryDirectory() as folder:
        simulate(1, fn)


frozen_names = st.sampled_from(["0.", "2.", "0.weight", "2.bias"])


@given(
    frozen=frozen_names,
    before=st.integers(0, 5),
    size=st.sampled_from([1, 2]),
    fragments=st.sampled_from([1, 2]),
    mix=st.sampled_from([0.0, 0.5]),
    delay=st.sampled_from([0, 1]),
)
def test_what_is_frozen_moves_by_no_outer_momentum(
    frozen, before, size, fragments, mix, delay
):
    """Under diloco it stays, bitwise, where ranks have met; in few bits up to their rounding."""
    diloco = af.diloco(sync_every=3, fragments=fragments, mix=mix, delay=delay)

    def fn(world):
        setup = af.chain(af.shard_data(), diloco)
        state = trained(created(world, "diloco").with_setup(setup), before)
        # all that was trained is in the mean, and ranks have met there
        state = af.finalize(state)
        state = state.with_trainable(lambda name, _: not name.startswith(frozen))
        held = {n: p.clone() for n, p in state.params.items() if n.startswith(frozen)}
        for updates in (1, 2, 4):
            state = trained(state, updates)
            now = {name: state.params[name] for name in held}
            assert differences(held, now) == [], updates
            seen = af.eval_params(state)
            assert differences(held, {name: seen[name] for name in held}) == []
        state = af.finalize(state)
        assert differences(held, {name: state.params[name] for name in held}) == []
        return dict(state.params)

    first, *others = simulate(size, fn)
    for other in others:
        assert differences(first, other) == []


@given(frozen=frozen_names, mix=st.sampled_from([0.0, 0.5]))
def test_what_is_frozen_apart_goes_to_the_mean(frozen, mix):
    """What two ranks had trained since they met is averaged once, with no outer step."""

    def fn(world):
        setup = af.chain(af.shard_data(), af.diloco(sync_every=3, mix=mix))
        state = created(world, "diloco").with_setup(setup)
        state = trained(state, 2)
        state = state.with_trainable(lambda name, _: not name.startswith(frozen))
        apart = {n: p.clone() for n, p in state.params.items() if n.startswith(frozen)}
        state = af.finalize(trained(state, 1))
        return apart, {name: state.params[name] for name in apart}

    (one, together), (two, _) = simulate(2, fn)
    for name, each in together.items():
        mean = (one[name] + two[name]) / 2
        assert torch.allclose(each, mean, rtol=0, atol=1e-14), name


class Noisy(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                param.add_(torch.randn_like(param), alpha=0.01)


@given(
    size=st.sampled_from([1, 2]),
    cut=st.integers(0, 3),
    drawn=st.integers(0, 3),
    parts=st.booleans(),
)
def test_an_optimizer_that_draws_is_a_function_of_the_state(size, cut, drawn, *, parts):
    """Replicas draw alike, and a run that is resumed what the other would have drawn."""
    optimizer: Any = partial(Noisy, lr=0.1)
    if parts:
        optimizer = af.combine_optimizers(
            (lambda name, _: "weight" in name, optimizer), (..., SGD)
        )

    def fn(world):
        def begin():
            data = af.Data(X, global_batch_size=8)
            options = {"model": net, "optimizer": optimizer, "setup": DDP}
            return af.TrainState.create(**options, data=data, world=world)

        torch.manual_seed(world.rank)
        whole = trained(begin(), 4)
        before = torch.get_rng_state()
        half = trained(begin(), cut)
        assert torch.equal(before, torch.get_rng_state())
        torch.rand(drawn)  # as the rest of a program may
        af.save(half, Path(folder) / "half")
        resumed = trained(af.load(begin(), Path(folder) / "half"), 4 - cut)
        assert differences(tensors(whole), tensors(resumed)) == []
        return dict(whole.params)

    with tempfile.TemporaryDirectory() as folder:
        first, *others = simulate(size, fn)
    for other in others:
        assert differences(first, other) == []


APART = {
    "load_part": (lambda s, f: by_load_part(s, None, f, f"{s.world.rank}"), "0.weight"),
    "with_trainable": (
        lambda s, _: s.with_trainable(lambda n, _: s.world.is_main or n[0] == "2"),
        "0.weight",
    ),
    "seek": (
        lambda s, _: af.seek(s, 8 * s.world.rank, epoch=1),
        r"cursor: epoch 1, sample 0.*\n.*cursor: epoch 1, sample 8",
    ),
}


@pytest.mark.parametrize("act", APART)
@given(updates=st.integers(0, 2))
def test_ranks_that_part_in_mid_run_are_told(act, updates):
    """What each rank is given for itself is found at the next update, before it is taken."""
    change, words = APART[act]

    def fn(world):
        with warnings.catch_warnings(action="ignore"):  # of slots that go on
            state = change(trained(created(world, "ema"), updates), folder)
        with pytest.raises(ReplicaMismatchError, match=words):
            trained(state, 1)

    with tempfile.TemporaryDirectory() as folder:
        for seed in (0, 1):
            other = created(single(), "ema", seed=seed)
            af.save(other, Path(folder) / f"{seed}")
        simulate(2, fn)
