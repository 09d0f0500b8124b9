# SPDX-License-Identifier: Apache-2.0
"""Megatron-core's layers train what torch's do, whole and in parts."""

import importlib
import tempfile
from typing import Any

import attrs
import torch
from hypothesis import given
from hypothesis import strategies as st

import accelfn as af
from tests.internals import cut_axes, is_shard, local
from tests.laws.layers_of_megatron import HEAD_NORMS, MegatronSpeech
from tests.laws.parallel_layers import (
    LYING,
    PLAN,
    UNSPLIT,
    Found,
    Lying,
    Speech,
    check_near,
    seen,
    speeches,
    stepped,
)
from tests.laws.worlds import single
from tests.strategies import differences, tensors

lying = st.sampled_from(LYING)
trainings = speeches(plan=HEAD_NORMS, padding=None)  # Megatron's has none
heads = st.booleans()


@given(
    speech=trainings,
    rows=heads,
    lying=st.sampled_from([*LYING, *UNSPLIT]),
    dtype=st.sampled_from([torch.float64, torch.float64, torch.float32]),
)
def test_layers_of_megatron_train_what_torch_s_do(
    speech: Speech, rows: bool, lying: Lying, dtype: torch.dtype
) -> None:
    """Parameters, optimizer state, averages, metrics and evaluation are those of one rank."""
    speech = attrs.evolve(speech, dtype=dtype)
    begun, setup = speech.state(single()), lying.setup(HEAD_NORMS)
    start = {name: param.clone() for name, param in begun.params.items()}
    ours = MegatronSpeech.like(speech, rows=rows, start=start)
    ranks = lying.on_ranks(lambda world: seen(ours.state(world, *setup), speech))
    check_near(seen(begun, speech), ranks, dtype)
    megatron_s_groups = importlib.import_module("megatron.core.parallel_state")
    assert not megatron_s_groups.is_initialized()


@given(
    speech=trainings,
    rows=heads,
    one=st.sampled_from([*LYING, *UNSPLIT]),
    other=st.sampled_from([*LYING, *UNSPLIT]),
    swapped=st.booleans(),
    updates=st.integers(0, 1),
)
def test_what_torch_s_layers_saved_megatron_s_go_on_with(
    speech: Speech, rows: bool, one: Lying, other: Lying, swapped: bool, updates: int
) -> None:
    """And the other way round, in any layout: bitwise, and alike from there."""
    torch_s, megatron_s = (
        attrs.evolve(speech, plan=PLAN),
        MegatronSpeech.like(speech, rows=rows),
    )
    first, second = (megatron_s, torch_s) if swapped else (torch_s, megatron_s)
    with tempfile.TemporaryDirectory() as folder:

        def save(world: af.World) -> tuple[Found, Found]:
            state, _ = stepped(first.state(world, *one.setup(first.plan)), updates)
            af.save(state, f"{folder}/saved")
            return tensors(state), tensors(stepped(state, 1)[0])

        def load(world: af.World) -> tuple[Found, Found]:
            state = second.state(world, *other.setup(second.plan))
            state = af.load(state, f"{folder}/saved")
            return tensors(state), tensors(stepped(state, 1)[0])

        (saved, after), *_ = one.on_ranks(save)
        for loaded, went_on in other.on_ranks(load):
            for found in (saved, after, loaded, went_on):
                found.pop("buffers.seen", None)
            assert differences(saved, loaded) == []
            assert differences(after, went_on, within=1e-9) == []


@given(
    speech=trainings, rows=heads, lying=lying, init=st.sampled_from(["whole", "shard"])
)
def test_any_number_of_ranks_begins_with_the_same(
    speech: Speech, rows: bool, lying: Lying, init: Any
) -> None:
    """What is drawn, bitwise; and each rank has its part of it, before and after updates."""
    ours, setup = MegatronSpeech.like(speech, rows=rows), lying.setup(HEAD_NORMS)
    alone = tensors(ours.state(single(), init=init))

    def begun(world: af.World) -> Found:
        state = ours.state(world, *setup, init=init)
        found = tensors(state)
        for now in (state, stepped(state.copy(), 2)[0]):
            for name, param in now.params.items():
                is_whole = ours.rows and name == "head.bias"
                is_cut = "tp" in cut_axes(param)
                assert is_cut is (name.endswith(CUT) and not is_whole), name
                if is_shard(param):
                    assert local(param).numel() < param.numel()
        return found

    for found in lying.on_ranks(begun):
        assert differences(alone, found) == []


CUT = (
    *("tokens.weight", "query.weight", "query.bias", "both.weight", "both.bias"),
    *("out.weight", "up.weight", "up.bias", "down.weight", "head.weight", "head.bias"),
)
