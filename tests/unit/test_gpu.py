# SPDX-License-Identifier: Apache-2.0
"""On an accelerator: precisions, compiled steps, memory, and that nothing waits for the device.

Tests marked `cuda` ask for what CUDA alone has; the others run on the fake accelerator in CI.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import accelfn as af
from tests.accelerator import fake
from tests.internals import devices

pytestmark = pytest.mark.gpu

ADAMW = partial(torch.optim.AdamW, lr=1e-3, fused=True)


def net(width: int = 256) -> nn.Module:
    hidden = (nn.Linear(width, width), nn.GELU(), nn.Linear(width, width), nn.GELU())
    return nn.Sequential(*hidden, nn.Linear(width, 16))


def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
    inputs, targets = batch
    return cross_entropy(model(inputs), targets)


def batch(width: int = 256) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(64, width, generator=generator)
    targets = torch.randint(0, 16, (64,), generator=generator)
    return inputs.to(devices.kind()), targets.to(devices.kind())


def create(*setup: object, **options: Any) -> af.TrainState:
    return af.TrainState.create(
        **{"model": net, "optimizer": ADAMW, **options},
        setup=af.chain(*setup),
        world=af.World.single(),
    )


@contextmanager
def nobody_waits() -> Iterator[None]:
    if devices.kind() == fake.NAME:
        with fake.waits() as found:
            yield
        assert found == []
        return
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(action="ignore"):
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def needs_float8() -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("products in float8 need compute capability 8.9")


# of torchao, where it is compiled as it is imported
@pytest.mark.filterwarnings("ignore:invalid escape sequence")
@pytest.mark.parametrize(
    "precision", ["bf16", "fp16", pytest.param("fp8", marks=pytest.mark.cuda)]
)
def test_a_precision_trains_as_float32_does(precision):
    """After 100 updates on one batch the loss is that of float32, to 0.05 of the first."""
    if precision == "fp8":
        needs_float8()
    values, last = batch(), {}
    for setup in (None, af.autocast(precision)):
        state, step = create(setup), af.make_step(loss_fn)
        first = None
        while state.step < 100:
            state, metrics = step(state, values)
            first = first or float(metrics["loss"])
        last[setup] = float(metrics["loss"]) / first
    plain, low = last.values()
    assert plain < 0.5
    assert abs(plain - low) < 0.05


@pytest.mark.parametrize(
    "setup",
    [
        (),
        (af.autocast("bf16"), af.clip_grad_norm(1.0), af.ema(0.99)),
        (af.autocast("fp16"), af.clip_grad_norm(1.0)),
        (af.accumulate(num_micro_batches=2), af.autocast("bf16")),
        (af.clip_grad_value(1.0), af.ema(0.9), af.local_sgd(sync_every=2)),
    ],
    ids=repr,
)
def test_twenty_steps_without_a_synchronisation(setup):
    """The host runs ahead of the device, under fp16 with a fused optimizer too."""
    accumulates = any(isinstance(each, af.accumulate) for each in setup)
    values = af.micro_batches(batch(), 2) if accumulates else batch()
    state, step = create(*setup), af.make_step(loss_fn)
    for _ in range(3):
        state, _ = step(state, values)
    with nobody_waits():
        for _ in range(20):
            state, _ = step(state, values)
    assert state.num_tried == 23


def test_an_overflow_is_skipped_on_the_device():
    """A loss that overflows leaves the parameters, and the count is right when it is asked for."""
    state, step = create(af.autocast("fp16", init_scale=2.0**10)), af.make_step(loss_fn)
    inputs, targets = batch()
    state, _ = step(state, (inputs, targets))
    before = {name: param.clone() for name, param in state.params.items()}
    with nobody_waits():
        state, metrics = step(state, (inputs * torch.inf, targets))
    assert float(metrics["skipped"]) == 1.0
    assert (state.step, state.num_skipped) == (1, 1)
    assert all(torch.equal(before[name], each) for name, each in state.params.items())


@pytest.mark.cuda
def test_a_compiled_step():
    """It gives what the plain step gives, up to rounding."""
    values, found = batch(), []
    for setup in (None, af.compile()):
        state, step = create(setup), af.make_step(loss_fn)
        for _ in range(5):
            state, _ = step(state, values)
        found.append({name: param.clone() for name, param in state.params.items()})
    for name, param in found[0].items():
        torch.testing.assert_close(param, found[1][name], rtol=1e-3, atol=1e-4)


@pytest.mark.cuda
def test_memory_is_that_of_the_loop_by_hand():
    """At the peak it takes at most a hundredth more."""

    def by_hand():
        model = net(2048).cuda()
        optimizer = ADAMW(model.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            loss_fn(model, values).backward()
            optimizer.step()

    def by_accelfn():
        state, step = create(model=partial(net, 2048)), af.make_step(loss_fn)
        for _ in range(3):
            state, _ = step(state, values)

    values = batch(2048)
    assert peak(by_accelfn) <= 1.01 * peak(by_hand)


def peak(train: Callable[[], None]) -> int:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    train()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()
