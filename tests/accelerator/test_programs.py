# SPDX-License-Identifier: Apache-2.0
"""Whatever is trained on an accelerator is what the CPU trains, on one rank and on several."""

import importlib.util
from collections.abc import Callable
from math import prod
from typing import Any

import attrs
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import accelfn as af
from accelfn.testing import simulate
from accelfn.testing.strategies import Program, programs
from tests.accelerator.tested_device import (
    IS_FAKE,
    NAME,
    device_names,
    different,
    near,
    on_cpu,
)
from tests.laws import test_blocks as blocks
from tests.laws.layers_of_megatron import HEAD_NORMS, MegatronSpeech
from tests.laws.long_texts import AXES, Text, texts
from tests.laws.parallel_layers import (
    LYING,
    PLAN,
    SEQUENCE,
    Lying,
    Speech,
    seen,
    speeches,
)
from tests.laws.test_blocks import Call, calls
from tests.laws.test_context import trained
from tests.laws.worlds import close_means
from tests.ranks import programs_of_devices
from tests.strategies import differences

NO_DEEPSPEED, NO_MEGATRON = (
    importlib.util.find_spec(name) is None for name in ("deepspeed", "megatron")
)

pytestmark = pytest.mark.gpu


def fits(program: Program) -> bool:
    """Whether torch does it on a device that Python made.

    DistributedDataParallel pins memory for its map of unused parameters, in C++; compilers
    know no such device, and what they make of a program on another takes a minute.
    """
    return not any(
        isinstance(each, af.compile)
        or (
            IS_FAKE
            and isinstance(each, af.wrap_ddp)
            and (each.find_unused_parameters or each.static_graph)
        )
        for each in program.setup
    )


@settings(max_examples=60)
@given(program=programs(), size=st.integers(1, 3))
def test_a_drawn_program_trains_what_it_trains_on_the_cpu(
    program: Program, size: int
) -> None:
    """Parameters, buffers, optimizer, slots and metrics, on one rank and on several.

    Hardware rounds and draws in its own way: there it is what it trained the first time.
    """
    assume(fits(program))

    def run(world: af.World) -> Any:
        state, metrics = program.train(program.state(world))
        kinds = device_names((dict(state.params), dict(state.buffers)))
        assert kinds == {world.device.type}
        read = [{k: float(v) for k, v in each.items()} for each in metrics]
        return on_cpu(state), repr(read), state.step

    host = simulate(size, run, device="cpu" if IS_FAKE else NAME)
    device = simulate(size, run, device=NAME)
    for one, two in zip(host, device, strict=True):
        assert different(one[0], two[0]) == []
        assert one[1:] == two[1:]


SETUPS: dict[str, Any] = {
    "fsdp": (af.shard_data(), af.wrap_fsdp()),
    "local_sgd": (af.shard_data(), af.local_sgd(sync_every=2)),
    "compress": (af.shard_data(), af.wrap_ddp(), af.compress_grads("bf16")),
    "in backward": (af.shard_data(), af.wrap_ddp(), af.optimizer_in_backward()),
    "batchnorm": (af.shard_data(), af.wrap_ddp(), af.sync_batchnorm()),
    "fp16": (af.shard_data(), af.wrap_ddp(), af.autocast("fp16", init_scale=4.0)),
    "bf16": (af.shard_data(), af.wrap_ddp(), af.autocast("bf16")),
}

CLOSE = {"compress": 1e-2, "fp16": 1e-2, "bf16": 1e-2}
"""How near hardware comes in 16 bits, of which kernels keep what they like."""


def test_what_ranks_share_on_an_accelerator_is_what_they_share_on_the_cpu():
    """Split models, averages, compressed gradients, updates in the backward pass, norms."""
    inputs = (torch.arange(72.0) * 1.7).sin().view(24, 3)

    def run(world: af.World, setup: Any) -> Any:
        state = af.TrainState.create(
            model=lambda: torch.nn.Sequential(
                # a bias before a norm has no gradient, but rounding that AdamW makes large
                torch.nn.Linear(3, 4, bias=False),
                torch.nn.BatchNorm1d(4)
                if af.sync_batchnorm() in setup
                else torch.nn.Dropout(0.5 if IS_FAKE else 0.0),
                torch.nn.Linear(4, 2),
            ),
            optimizer=lambda params: torch.optim.AdamW(params, lr=0.125),
            data=af.Data(inputs, global_batch_size=8),
            setup=af.chain(*setup),
            world=world,
        )
        step = af.make_step(lambda model, batch: model(batch).square().mean())
        for batch in af.batches(state, until_epoch=2):
            state, _ = step(state, batch)
        state = af.finalize(state)
        return {n: p.cpu() for n, p in af.eval_params(state).items()}

    for name, setup in SETUPS.items():
        host = simulate(2, lambda world, s=setup: run(world, s))
        device = simulate(2, lambda world, s=setup: run(world, s), device=NAME)
        for one, two in zip(host, device, strict=True):
            assert near(_plain(one), _plain(two), within=CLOSE.get(name, 1e-6)), name


def _plain(params: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {n: getattr(p, "_local_tensor", p) for n, p in params.items()}


# models that are split over ranks

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


# a process that joins others by the device's own backend: NCCL, of one device


@pytest.fixture(scope="module")
def by_nccl() -> dict[str, Any]:
    """Return what one rank of NCCL trains."""
    (found,) = af.launch(1, programs_of_devices.on_the_device, device="cuda")
    return found


@pytest.mark.cuda
@pytest.mark.parametrize("name", [*programs_of_devices.SETUPS][2:])
def test_one_rank_of_nccl_trains_what_a_plain_state_does(by_nccl, name):
    """Parameters, the loss and an evaluation, but for rounding."""
    assert "nccl" in by_nccl["backends"]
    plain = programs_of_devices.OF_MICRO_BATCHES[0]
    base = by_nccl[plain if name in programs_of_devices.OF_MICRO_BATCHES else "plain"]
    found = by_nccl[name]
    if name in programs_of_devices.OUTER:
        assert found["loss"] < 2 * base["loss"]
    elif name in programs_of_devices.COARSE:
        assert abs(found["loss"] - base["loss"]) < 0.05 * base["loss"]
    else:
        assert near(base, found, within=1e-4)


@pytest.mark.cuda
def test_a_run_goes_on_from_an_asynchronous_save_bitwise():
    """Under each setup: kernels of one device, on the same batches, round alike."""
    (found,) = af.launch(1, programs_of_devices.saved_and_gone_on, device="cuda")
    assert {name: wrong for name, wrong in found.items() if wrong} == {}


@pytest.mark.cuda
@pytest.mark.skipif(NO_DEEPSPEED, reason="DeepSpeed is missing")
def test_one_rank_of_deepspeed_trains_what_a_plain_state_does(monkeypatch):
    """At each stage of ZeRO."""
    monkeypatch.setenv("DS_ACCELERATOR", "cuda")
    (found,) = af.launch(1, programs_of_devices.of_zero, device="cuda")
    for name in programs_of_devices.ZERO.keys() - {"plain"}:
        assert near(found["plain"], found[name], within=1e-4), name


@pytest.mark.cuda
def test_a_batch_size_is_found_in_the_memory_that_there_is():
    """What does not fit is given up, and its memory is there for the next try."""
    ((found, tries),) = af.launch(1, programs_of_devices.searched, 0.02, device="cuda")
    assert tries > 1
    assert found * 256 * 256 * 4 * 2 < 0.02 * 200e9
