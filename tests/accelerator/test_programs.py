# SPDX-License-Identifier: Apache-2.0
"""Whatever is trained on an accelerator is what the CPU trains: on the fake one, bitwise."""

from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import accelfn as af
from accelfn.testing import simulate
from accelfn.testing.strategies import Program, programs
from tests.accelerator.tested_device import IS_FAKE, NAME, near
from tests.accelerator.trees import device_names, different, on_cpu

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
