# SPDX-License-Identifier: Apache-2.0
"""Models that are split, on real processes: as on simulated ranks, and as torch alone."""

import tempfile
import warnings
from functools import partial
from itertools import islice
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import accelfn as af
from accelfn.testing import simulate
from tests.laws.drawn_models import Drawing, drawings, drawn_in
from tests.laws.layers_of_megatron import HEAD_NORMS, MegatronSpeech
from tests.laws.long_texts import Text, engines, loss_of_tokens, texts
from tests.laws.parallel_layers import DDP, FSDP, PLAN, Lying, Speech, speeches
from tests.laws.split_models import LOSSES, Run, runs, wraps
from tests.processes import run_ranks
from tests.ranks import programs_of_layers
from tests.ranks.programs_of_layers import by_accelfn
from tests.ranks.programs_of_shards import UPDATES, Training, by_hand, swaps
from tests.strategies import differences

pytestmark = pytest.mark.ranks(2)

SQUARE = {"dp_replicate": 2, "dp_shard": 2}
PAIRS = {"dp_shard": 2, "cp": 2}


@given(run=runs(), wrap=wraps)
def test_split_models_train_as_on_gloo(run: Run, wrap: object) -> None:
    """States, metrics, what is saved and loaded, and what is evaluated, of any setup."""
    with tempfile.TemporaryDirectory() as folder:
        axes = {"dp_shard": 2}
        training = Training(run, wrap, axes, folder)
        simulate(2, training, axes=axes, also="processes")


def test_units_cross_by_all_to_all():
    """Over Gloo every gather and every reduction is one; simulated ranks call them by name."""
    kinds = [entry.kind for entry in simulate(2, swaps, axes={"dp_shard": 2}).log]
    gathers, reductions = (
        kinds.count(kind) // 2
        for kind in ("all_gather_single", "reduce_scatter_single")
    )
    assert reductions == 2
    assert run_ranks(2, swaps, axes={"dp_shard": 2}) == [gathers + reductions] * 2


together = st.just(af.identity())
apart = st.builds(af.local_sgd, sync_every=st.integers(1, 2), opt_state=st.booleans())


@pytest.mark.parametrize(
    ("dtype", "near"), [(torch.float64, 1e-12), (torch.float32, 1e-5)]
)
@settings(max_examples=4)
@given(run=runs(), wrap=wraps, copies=together | apart)
def test_copies_of_split_models_train_as_on_gloo(
    dtype: torch.dtype, near: float, run: Run, wrap: object, copies: object
) -> None:
    """Up to rounding: Gloo adds up in an order of its own what four ranks have.

    torch divides by the number of ranks otherwise in 32 bits than in 64.
    """
    run = attrs.evolve(run, dtype=dtype)
    with tempfile.TemporaryDirectory() as folder:
        training = Training(run, af.chain(wrap, copies), SQUARE, folder)
        simulated = simulate(4, training, axes=SQUARE)
        real = run_ranks(4, training, axes=SQUARE)
        for one, other in zip(simulated, real, strict=True):
            for ours, theirs in zip(
                map(numbers, one), map(numbers, other), strict=True
            ):
                assert differences(ours, theirs, within=near) == []


@settings(max_examples=3)
@given(run=runs(), axis=st.sampled_from(["dp_shard", "dp_replicate"]), every=apart)
def test_workers_train_as_on_gloo(run: Run, axis: str, every: object) -> None:
    """Up to rounding, as of copies that are split: four ranks compare and evaluate together."""
    with tempfile.TemporaryDirectory() as folder:
        setup = af.chain(af.wrap_ddp(within=axis), every)
        training = Training(run, setup, SQUARE, folder)
        simulated = simulate(4, training, axes=SQUARE)
        real = run_ranks(4, training, axes=SQUARE)
        for one, other in zip(simulated, real, strict=True):
            for ours, theirs in zip(
                map(numbers, one), map(numbers, other), strict=True
            ):
                assert differences(ours, theirs, within=1e-12) == []


@settings(max_examples=5)
@given(text=texts(2), engine=engines)
def test_split_sequences_train_as_on_gloo(text: Text, engine: object) -> None:
    """States and metrics of two ranks, and of two pairs of them, bitwise or up to rounding."""
    training = partial(read, text=text, engine=engine)
    simulate(2, training, axes={"cp": 2}, also="processes")
    simulated = simulate(4, training, axes=PAIRS)
    for ours, theirs in zip(simulated, run_ranks(4, training, axes=PAIRS), strict=True):
        assert differences(numbers(ours), numbers(theirs), within=1e-12) == []


@settings(max_examples=5)
@given(speech=speeches(), engine=st.sampled_from([DDP, *FSDP]))
def test_split_layers_train_as_on_gloo(speech: Speech, engine: Any) -> None:
    """States and metrics of two ranks, and of two pairs of them, bitwise or up to rounding."""
    pair = partial(by_accelfn, speech=speech, lying=Lying({"tp": 2}))
    simulate(2, pair, axes={"tp": 2}, also="processes")
    axes = {"dp_shard": 2, "tp": 2}
    pairs = partial(by_accelfn, speech=speech, lying=Lying(axes, engine))
    simulated = simulate(4, pairs, axes=axes)
    for ours, theirs in zip(simulated, run_ranks(4, pairs, axes=axes), strict=True):
        assert differences(numbers(ours), numbers(theirs), within=1e-12) == []


@settings(max_examples=5)
@given(drawing=drawings(), engine=st.sampled_from([DDP, FSDP[0]]))
def test_what_is_drawn_in_parts_is_the_same_on_gloo(
    drawing: Drawing, engine: Any
) -> None:
    """Parameters, buffers, averages and what the optimizer begins with, bitwise."""
    program = partial(drawn_in, drawing=drawing, engine=engine)
    axes = {"dp_shard": 2}
    simulated = simulate(2, program, axes=axes, also="processes")
    alone = drawn_in(af.World.single(device="cpu"), drawing, ())
    for found in simulated:
        assert differences(alone, found) == []


@pytest.mark.parametrize("size", [2, 4])
def test_layers_by_hand_do_the_same(size):
    """torch's parallelize_module, on as many real processes."""
    speech, axes = Speech(6, 3, PLAN), {"tp": size}
    ours = partial(by_accelfn, speech=speech, lying=Lying(axes))
    theirs = partial(programs_of_layers.by_hand, speech=speech)
    for one, other in zip(
        run_ranks(size, ours, axes=axes),
        run_ranks(size, theirs, axes=axes),
        strict=True,
    ):
        params = {name: value for name, value in one.items() if name in other}
        assert differences(other, params, within=1e-12) == []


@settings(max_examples=2)
@given(
    speech=speeches(plan=HEAD_NORMS, padding=None).map(MegatronSpeech.like),
    engine=st.sampled_from([DDP, *FSDP]),
)
def test_layers_of_megatron_train_as_on_gloo(
    speech: MegatronSpeech, engine: Any
) -> None:
    """Two pairs of real processes, up to rounding."""
    axes = {"dp_shard": 2, "tp": 2}
    pairs = partial(by_accelfn, speech=speech, lying=Lying(axes, engine))
    simulated = simulate(4, pairs, axes=axes)
    for ours, theirs in zip(simulated, run_ranks(4, pairs, axes=axes), strict=True):
        assert differences(numbers(ours), numbers(theirs), within=1e-12) == []


def megatron_by_hand(world: af.World, speech: MegatronSpeech) -> Any:
    """Train by Megatron's layers alone, which are imported without what they say of it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tests.ranks import programs_of_megatron

        return programs_of_megatron.by_hand(world, speech)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("tied", [False, True])
def test_megatron_by_hand_does_the_same(size, tied):
    """Its own layers of a rank's parts, and an optimizer, on as many real processes."""
    speech, axes = MegatronSpeech(6, 3, HEAD_NORMS, tied=tied), {"tp": size}
    ours = partial(by_accelfn, speech=speech, lying=Lying(axes))
    theirs = partial(megatron_by_hand, speech=speech)
    for one, other in zip(
        run_ranks(size, ours, axes=axes),
        run_ranks(size, theirs, axes=axes),
        strict=True,
    ):
        params = {name: value for name, value in one.items() if name in other}
        assert differences(other, params, within=1e-12) == []


def read(world: af.World, text: Text, engine: object) -> dict[str, Any]:
    """Return the parameters after two updates, and the metrics of the last."""
    state = text.state(world, engine, text.sharing)
    step, metrics = af.make_step(loss_of_tokens), af.Metrics({})
    for batch in islice(af.batches(state), 2):
        state, metrics = step(state, batch)
    return {**af.full_params(state, at="train"), **metrics.all_reduce_mean(world)}


def numbers(found: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return a state's tensors, or metrics, as tensors."""
    return {name: torch.as_tensor(value) for name, value in found.items()}


def trained(world: af.World, run: Run) -> dict[str, torch.Tensor]:
    """Train by accelfn."""
    state, step = run.state(world, af.wrap_fsdp()), af.make_step(LOSSES[run.loss])
    for batch in run.batches(state, UPDATES):
        state, _ = step(state, batch)
    return af.full_params(state, at="train")


@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
@pytest.mark.parametrize("size", [2, 4])
def test_a_loop_by_hand_does_the_same(size, optimizer):
    """torch's fully_shard and an optimizer of DTensors, on as many real processes."""
    run = Run(8, 8, "mean", optimizer, in_list=True, micro=1)
    for one, other in zip(
        run_ranks(size, partial(trained, run=run)),
        run_ranks(size, partial(by_hand, run=attrs.evolve(run))),
        strict=True,
    ):
        assert differences(other, one, within=1e-12) == []
