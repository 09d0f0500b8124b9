# SPDX-License-Identifier: Apache-2.0
"""A step depends on (state, batch, extras) alone, and changes nothing else."""

import contextlib
import functools
import itertools
import random
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import accelfn as af
from accelfn.testing import simulate
from tests.catalog import stacks
from tests.internals import tensor_leaves
from tests.strategies import LOSSES, Net, Run, differences, runs, tensors

KINDS = st.sampled_from(["plain", "tied", "frozen", "norm", "dropout", "unused"])


def setups() -> st.SearchStrategy[object]:
    """Draw a chain of the catalog's transforms, in any order that composes."""
    return stacks(4).map(lambda found: af.chain(*found))


def first_batch(state: af.TrainState) -> af.Batch:
    return next(iter(af.batches(state)))


def make(run: Run, kind: str, setup: object) -> Run:
    return attrs.evolve(
        run, kind=kind, setup=setup, n=max(run.n, 12), batch_size=6, dyadic=False
    )


RANKED = [
    af.chain(af.shard_data(), af.wrap_ddp(find_unused_parameters=True)),
    af.chain(
        af.shard_data(),
        af.accumulate(num_micro_batches=2),
        af.wrap_ddp(find_unused_parameters=True, gradient_as_bucket_view=False),
        af.clip_grad_norm(0.5),
        af.ema(0.5),
    ),
    af.chain(af.shard_data(), af.local_sgd(sync_every=2), af.clip_grad_value(0.25)),
]


@given(run=runs(), kind=KINDS, setup=st.sampled_from(RANKED), size=st.integers(2, 3))
def test_the_same_step_twice_on_ranks(run, kind, setup, size):
    """On every rank too, a step is a function, donate=False a copy, and forks do not meet."""
    n = 24 if kind == "norm" else run.n  # two samples in every micro-batch
    run = attrs.evolve(run, kind=kind, setup=setup, n=n, dyadic=False)
    run = attrs.evolve(run, batch_size=12) if kind == "norm" else run

    def step_twice(world: af.World) -> None:
        step = af.make_step(LOSSES[run.loss])
        state, _ = run.train(run.state(world), 1)
        batch = first_batch(state)
        before = tensors(state)
        one, _ = step(state, batch, donate=False)
        assert differences(before, tensors(state)) == []
        fork = state.copy()
        two, _ = step(state, batch)
        assert differences(before, tensors(fork)) == []
        three, _ = step(fork, batch)
        for other in (two, three):
            assert differences(tensors(one), tensors(other)) == []

    simulate(size, step_twice)


@given(
    run=runs(),
    kind=KINDS,
    setup=setups(),
    modes=st.sets(st.sampled_from(["no_grad", "inference", "autocast"])),
)
def test_the_process_is_as_before(run, kind, setup, modes):
    """A step touches no generator or mode, and no mode of the caller touches a step."""
    run = make(run, kind, setup)
    expected, _ = run.train(run.state())
    saved = (torch.get_rng_state(), random.getstate(), str(np.random.get_state()))  # noqa: NPY002
    dtype = torch.get_default_dtype()
    contexts = {
        "no_grad": torch.no_grad,
        "inference": torch.inference_mode,
        "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    }
    with contextlib.ExitStack() as stack:
        state = run.state()
        for mode in modes:
            stack.enter_context(contexts[mode]())
        step = af.make_step(LOSSES[run.loss])
        for batch in itertools.islice(af.batches(state), run.updates):
            assert not any(map(torch.is_inference, tensor_leaves(batch.micro_batches)))
            state, _ = step(state, batch)
    assert differences(tensors(expected), tensors(state)) == []
    assert torch.equal(saved[0], torch.get_rng_state())
    assert saved[1] == random.getstate()
    assert saved[2] == str(np.random.get_state())  # noqa: NPY002
    assert dtype is torch.get_default_dtype()
    assert torch.is_grad_enabled()


def train_in_float32(run: Run, setup: object) -> tuple[dict, set]:
    """Return what training gives, and the dtypes of parameters and gradients."""
    x, y = (each.float() for each in run.dataset())
    state = af.TrainState.create(
        model=lambda: Net(run.kind).float(),
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
        data=af.Data((x, y), global_batch_size=run.batch_size),
        setup=setup,
        seed=run.seed,
    )
    _, grads = af.value_and_grad(LOSSES[run.loss])(state, first_batch(state))
    state, metrics = run.train(state)
    dtypes = {t.dtype for t in [*grads.tensors.values(), *state.params.values()]}
    losses = {f"loss {i}": each["loss"].clone() for i, each in enumerate(metrics)}
    return tensors(state) | losses, dtypes


@given(run=runs(dyadic=False, loss="squared"))
def test_autocast_lowers_no_dtype(run: Run) -> None:
    """The setup's autocast changes values, and neither a parameter's dtype nor a gradient's."""
    plain, _ = train_in_float32(run, None)
    lower, dtypes = train_in_float32(run, af.autocast("bf16"))
    assert dtypes == {torch.float32}
    assert differences(plain, lower) != []


@pytest.mark.parametrize(
    "setup",
    [pytest.param(None, id="plain"), pytest.param(af.autocast("bf16"), id="autocast")],
)
@given(
    run=runs(dyadic=False, loss="squared"),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    enabled=st.booleans(),
)
def test_the_caller_s_autocast_changes_nothing(setup, run, dtype, enabled):
    """Whatever autocast surrounds the loop, every update is bitwise the same."""
    expected, _ = train_in_float32(run, setup)
    with torch.autocast("cpu", dtype=dtype, enabled=enabled):
        found, _ = train_in_float32(run, setup)
    assert differences(expected, found) == []


@given(run=runs(), setup=setups())
def test_building_and_applying_is_pure(run: Run, setup: object) -> None:
    """Applying a setup leaves the state it is applied to."""
    state, _ = run.train(attrs.evolve(run, setup=af.chain()).state())
    before = tensors(state)
    applied = af.chain(setup)(state)
    assert differences(before, tensors(state)) == []
    assert state.setup == af.chain()
    assert applied.setup == af.chain(setup)


@given(run=runs(updates=1), kind=KINDS, setup=setups())
def test_parameters_keep_their_dtype(run: Run, kind: str, setup: object) -> None:
    """No transform changes the dtype of a parameter or of a gradient."""
    run = make(run, kind, setup)
    state = run.state()
    dtypes = {name: param.dtype for name, param in state.params.items()}
    _, grads = af.value_and_grad(LOSSES[run.loss])(state, first_batch(state))
    assert {n: g.dtype for n, g in grads.tensors.items()}.items() <= dtypes.items()
    state, _ = run.train(state)
    assert dtypes == {name: param.dtype for name, param in state.params.items()}


@given(run=runs(optimizer="decay"), setup=setups())
@pytest.mark.parametrize("kind", ["frozen", "unused"])
def test_frozen_and_unused_parameters_stay(kind: str, run: Run, setup: object) -> None:
    """Parameters without a gradient are bitwise unchanged, under weight decay too."""
    run = attrs.evolve(run, kind=kind, setup=setup, dyadic=False)
    state = run.state()
    before = tensors(state)
    names = (
        ["params.first.weight", "params.first.bias"]
        if kind == "frozen"
        else ["params.unused"]
    )
    after = tensors(run.train(state)[0])
    for name in names:
        assert torch.equal(before[name], after[name])
    assert "params.head.weight" in differences(before, after) or run.loss == "weighted"


def remembering() -> torch.nn.Module:
    """Return a model with buffers."""
    return torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))


def whole(module: torch.nn.Module) -> list[torch.Tensor]:
    """Return a module's tensors."""
    return [*module.parameters(), *module.buffers()]


TAKEN: dict[str, Any] = {
    "a frozen model": lambda s, at: whole(af.snapshot_model(s, at=at)),
    "parameters as a whole": lambda s, at: af.full_params(s, at=at).values(),
    "a copy": lambda s, _: tensors(s.copy()).values(),
    "given parameters": lambda s, _: s.with_params(dict(s.params)).params.values(),
    "a move": lambda s, _: tensors(af.with_world(s, s.world)).values(),
}


@pytest.mark.parametrize("what", TAKEN)
@pytest.mark.parametrize("at", ["train", "eval"])
@pytest.mark.parametrize("setup", [None, af.ema(0.5)], ids=["plain", "averaged"])
def test_what_is_taken_of_a_state_is_the_takers(what, at, setup):
    """Who writes to it changes nothing of the state."""
    state = af.TrainState.create(
        model=remembering,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1, momentum=0.9),
        setup=setup,
    )
    step = af.make_step(lambda model, x: model(x).square().mean())
    state, _ = step(state, torch.ones(4, 3))
    before = {name: each.clone() for name, each in tensors(state).items()}
    for each in TAKEN[what](state, at):
        each.data.fill_(7)
    assert differences(before, tensors(state)) == []
