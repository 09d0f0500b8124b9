# SPDX-License-Identifier: Apache-2.0
"""Models that are split, on real processes: as on simulated ranks."""

import tempfile
from collections.abc import Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import attrs
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import accelfn as af
from accelfn.testing import simulate
from tests.laws import parallel_layers
from tests.laws.layers_of_megatron import HEAD_NORMS, MegatronSpeech
from tests.laws.long_texts import Text, engines, loss_of_tokens, texts
from tests.laws.parallel_layers import DDP, FSDP, Lying, Speech, speeches
from tests.laws.split_models import LOSSES, Run, runs, wraps
from tests.laws.test_shard_init import Drawing, drawings, drawn_in
from tests.processes import run_ranks
from tests.strategies import differences, tensors

pytestmark = pytest.mark.ranks(2)

UPDATES = 3


@attrs.frozen
class Training:
    """A training of a few updates; what it saves half-way is loaded again."""

    run: Run
    wrap: object
    axes: Mapping[str, int]
    folder: str

    def __call__(self, world: af.World) -> list[Any]:
        """Train; return the state's tensors after each update, and metrics."""
        state, seen = self.run.state(world, self.wrap), list[Any]()
        step = af.make_step(LOSSES[self.run.loss])
        for batch in self.run.batches(state, UPDATES):
            state, metrics = step(state, batch)
            seen += [tensors(state), metrics.all_reduce_mean(world)]
        place = Path(self.folder, f"of-{type(world.group).__name__}")
        af.save(state, place)
        loaded = af.load(self.run.state(world, self.wrap), place)
        held_out = af.evaluate(loaded, self.run.data(), LOSSES[self.run.loss])
        return [*seen, tensors(loaded), held_out]


def swaps(world: af.World) -> int:
    """Return how many all-to-all calls a step of a model of two layers makes."""
    state = af.TrainState.create(
        model=lambda: torch.nn.ModuleList([torch.nn.Linear(2, 2) for _ in "ab"]),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        setup=af.wrap_fsdp(),
        world=world,
    )
    step = af.make_step(lambda model, batch: model[1](model[0](batch)).sum())
    state, _ = step(state, torch.ones(1, 2))
    with pytest.MonkeyPatch.context() as patch:
        counted = mock.Mock(wraps=dist.all_to_all_single)
        patch.setattr(dist, "all_to_all_single", counted)
        step(state, torch.ones(1, 2))
    return counted.call_count


SQUARE = {"dp_replicate": 2, "dp_shard": 2}
PAIRS = {"dp_shard": 2, "tp": 2}


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


def on_four_ranks(program: Any, axes: dict[str, int], within: float = 1e-12) -> None:
    """Compare real ranks with simulated ones, up to rounding.

    Gloo adds up in an order of its own what four ranks have.
    """
    simulated = simulate(4, program, axes=axes)
    for one, other in zip(simulated, run_ranks(4, program, axes=axes), strict=True):
        ours, theirs = ([e] if isinstance(e, dict) else e for e in (one, other))
        for pair in zip(ours, theirs, strict=True):
            numbers = ({n: torch.as_tensor(v) for n, v in e.items()} for e in pair)
            assert differences(*numbers, within=within) == []


apart = st.builds(af.local_sgd, sync_every=st.integers(1, 2), opt_state=st.booleans())
copies = st.builds(af.chain, wraps, st.just(af.identity()) | apart) | st.builds(
    lambda axis, every: af.chain(af.wrap_ddp(within=axis), every),
    st.sampled_from(["dp_shard", "dp_replicate"]),
    apart,
)


@pytest.mark.parametrize(
    ("dtype", "near"), [(torch.float64, 1e-12), (torch.float32, 1e-5)]
)
@settings(max_examples=5)
@given(run=runs(), setup=copies)
def test_copies_train_as_on_gloo(
    dtype: torch.dtype, near: float, run: Run, setup: object
) -> None:
    """Four ranks agree up to rounding: torch divides otherwise in 32 bits than in 64."""
    run = attrs.evolve(run, dtype=dtype)
    with tempfile.TemporaryDirectory() as folder:
        on_four_ranks(Training(run, setup, SQUARE, folder), SQUARE, within=near)


@settings(max_examples=5)
@given(text=texts(2), engine=engines)
def test_split_sequences_train_as_on_gloo(text: Text, engine: object) -> None:
    """States and metrics of two ranks, and of two pairs of them, bitwise or up to rounding."""
    training = partial(read, text=text, engine=engine)
    simulate(2, training, axes={"cp": 2}, also="processes")
    on_four_ranks(training, {"dp_shard": 2, "cp": 2})


@settings(max_examples=5)
@given(speech=speeches(), engine=st.sampled_from([DDP, *FSDP]))
def test_split_layers_train_as_on_gloo(speech: Speech, engine: Any) -> None:
    """States and metrics of two ranks, and of two pairs of them, bitwise or up to rounding."""
    pair = partial(spoken, speech=speech, lying=Lying({"tp": 2}))
    simulate(2, pair, axes={"tp": 2}, also="processes")
    lying = Lying(PAIRS, engine)
    on_four_ranks(partial(spoken, speech=speech, lying=lying), PAIRS)


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


@settings(max_examples=2)
@given(
    speech=speeches(plan=HEAD_NORMS, padding=None).map(MegatronSpeech.like),
    engine=st.sampled_from([DDP, *FSDP]),
)
def test_layers_of_megatron_train_as_on_gloo(
    speech: MegatronSpeech, engine: Any
) -> None:
    """Two pairs of real processes, up to rounding."""
    lying = Lying(PAIRS, engine)
    on_four_ranks(partial(spoken, speech=speech, lying=lying), PAIRS)


def trained(state: af.TrainState, loss_fn: Any) -> dict[str, Any]:
    """Return the parameters after two updates, and the metrics of the last."""
    step, metrics = af.make_step(loss_fn), af.Metrics({})
    for batch in islice(af.batches(state), 2):
        state, metrics = step(state, batch)
    means = metrics.all_reduce_mean(state.world)
    return {**af.full_params(state, at="train"), **means}


def spoken(world: af.World, speech: Speech, lying: Lying) -> dict[str, Any]:
    state = speech.state(world, *lying.setup(speech.plan))
    return trained(state, parallel_layers.loss_of_tokens)


def read(world: af.World, text: Text, engine: object) -> dict[str, Any]:
    return trained(text.state(world, engine, text.sharing), loss_of_tokens)
