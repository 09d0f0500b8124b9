# SPDX-License-Identifier: Apache-2.0
"""Models that are split over ranks train on an accelerator what one rank trains there."""

import importlib.util
from collections.abc import Callable
from math import prod
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import accelfn as af
from accelfn.testing import simulate
from tests.accelerator.tested_device import IS_FAKE, NAME
from tests.laws import test_blocks as blocks
from tests.laws.layers_of_megatron import HEAD_NORMS, MegatronSpeech
from tests.laws.long_texts import AXES, Text, texts
from tests.laws.parallel_layers import LYING, PLAN, SEQUENCE, Lying, Speech, speeches
from tests.laws.test_blocks import Call, calls
from tests.laws.test_context import trained
from tests.laws.test_megatron import seen
from tests.laws.worlds import close_means
from tests.strategies import differences

NO_MEGATRON = importlib.util.find_spec("megatron") is None

pytestmark = pytest.mark.gpu

A_FEW = 2 if IS_FAKE else 8
"""Their laws have many more, on the CPU; on the fake one each kernel takes ten times as long."""
lying = st.sampled_from(LYING)
by_heads, by_ring = (
    st.sampled_from(AXES).flatmap(
        lambda axes, ring=ring: st.tuples(st.just(axes), texts(axes["cp"], ring=ring))
    )
    for ring in (False, True)
)
speech_of_rows = speeches(plan=PLAN)


def check(alone: Any, axes: dict[str, int], fn: Callable[[af.World], Any]) -> None:
    """Hold what ranks on the device found against what one rank found there."""
    expected, means = alone
    for found, others in simulate(prod(axes.values()), fn, axes=axes, device=NAME):
        found.pop("buffers.seen", None)  # where ranks see less, it is of less
        whole = {name: value for name, value in expected.items() if name in found}
        assert differences(whole, found, within=1e-10) == []
        assert all(close_means(*pair) for pair in zip(means, others, strict=True))


@settings(max_examples=A_FEW)
@given(speech=speech_of_rows, plan=st.sampled_from([PLAN, SEQUENCE]), lying=lying)
def test_split_layers_train_what_whole_ones_do(
    speech: Speech, plan: dict[str, str], lying: Lying
) -> None:
    """Columns, rows, vocabularies, and sequences between them."""
    speech = attrs.evolve(speech, plan=plan, dtype=torch.float64)
    alone = seen(speech.state(af.World.single()), speech)
    setup = lying.setup(plan)
    check(alone, lying.axes, lambda world: seen(speech.state(world, *setup), speech))


@settings(max_examples=A_FEW)
@given(by_heads=by_heads, by_ring=by_ring)
def test_parts_of_sequences_train_what_the_whole_does(
    by_heads: tuple[dict[str, int], Text], by_ring: tuple[dict[str, int], Text]
) -> None:
    """Whose attention is the device's own kernel, and in a ring products of blocks."""
    for axes, drawn in (by_heads, by_ring):
        text = attrs.evolve(drawn, dtype=torch.float64)
        setup = (af.wrap_ddp(), text.sharing)
        check(
            trained(af.World.single(), text),
            axes,
            lambda world, text=text, setup=setup: trained(world, text, *setup),
        )


@pytest.mark.skipif(IS_FAKE, reason="it has no kernel for blocks")
@given(call=calls, is_causal=st.booleans())
def test_blocks_are_attention_to_all_by_the_kernel_of_the_device(
    call: Call, is_causal: bool
) -> None:
    """In 16 bits, of a multiple of eight features and without a mask."""
    samples, heads, queries, features = call.num
    call = attrs.evolve(
        call,
        num=(samples, heads, queries, 8 * features),
        features=None,
        mask=None,
        cuts=(queries,) if is_causal else call.cuts,
        dtype=torch.bfloat16,
        device=NAME,
    )
    blocks.check(call, is_causal=is_causal)


@pytest.mark.filterwarnings("ignore:When using async grad allreduce")  # of speed
@pytest.mark.skipif(NO_MEGATRON, reason="Megatron-core is missing")
@settings(max_examples=A_FEW)
@given(speech=speeches(plan=HEAD_NORMS, padding=None), rows=st.booleans(), lying=lying)
def test_layers_of_megatron_train_what_torch_s_do(
    speech: Speech, rows: bool, lying: Lying
) -> None:
    """Split over ranks on the device."""
    speech = attrs.evolve(speech, dtype=torch.float64)
    begun = speech.state(af.World.single())
    start = {name: param.clone() for name, param in begun.params.items()}
    ours = MegatronSpeech.like(speech, rows=rows, start=start)
    setup = lying.setup(HEAD_NORMS)
    check(
        seen(begun, speech),
        lying.axes,
        lambda world: seen(ours.state(world, *setup), speech),
    )
