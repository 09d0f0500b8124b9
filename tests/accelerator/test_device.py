# SPDX-License-Identifier: Apache-2.0
"""States, batches, draws and checkpoints on an accelerator, and what it refuses."""

import threading
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import accelfn as af
from accelfn.testing import simulate
from tests.accelerator.tested_device import DEVICE, IS_FAKE, NAME, near
from tests.accelerator.trees import device_names, different, on_cpu
from tests.internals import devices, draws

pytestmark = pytest.mark.gpu
INPUTS = torch.linspace(-1, 1, 96).view(32, 3)
MODULE: Any = torch.get_device_module(DEVICE)


def net() -> nn.Module:
    return nn.Sequential(
        *(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))
    )


def create(world: af.World | None = None, **options: Any) -> af.TrainState:
    return af.TrainState.create(
        model=net,
        optimizer=partial(torch.optim.AdamW, lr=0.125),
        data=af.Data(INPUTS, global_batch_size=8, shuffle=True),
        world=world or af.World.single(),
        **options,
    )


def mean_square(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch).square().mean()


def train(state: af.TrainState, updates: int) -> af.TrainState:
    step = af.make_step(mean_square)
    for batch in af.batches(state, until_epoch=None):
        if updates == 0:
            break
        state, _ = step(state, batch)
        updates -= 1
    return state


def test_a_world_is_on_the_accelerator_that_torch_sees():
    """By default, by its name, and by the number of the local rank; no other is there."""
    assert devices.kind() == NAME
    assert devices.count() >= 1
    for asked in (None, NAME, f"{NAME}:0", DEVICE):
        assert af.World.single(device=asked).device == DEVICE
    for asked in (f"{NAME}:{devices.count()}", "mtia", "xpu:0"):
        with pytest.raises(af.errors.WorldError, match="needs .*, but torch finds"):
            af.World.single(device=asked)


def test_a_device_without_a_generator_is_refused(monkeypatch):
    """Where no draw could be repeated, nothing would be what it was after a resume."""
    MODULE.init()  # which makes them
    monkeypatch.setattr(MODULE, "default_generators", (), raising=False)
    with pytest.raises(af.errors.WorldError, match="could not be reproduced"):
        af.World.single()


def test_what_a_state_has_is_on_its_device():
    """Parameters, buffers, the optimizer's and transforms' tensors, and batches."""
    state = create(setup=af.chain(af.ema(0.5), af.skip_nonfinite()))
    seen: set[str] = set()

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        seen.update(device_names(batch))
        return mean_square(model, batch)

    step = af.make_step(loss_fn)
    for batch in af.batches(state, until_epoch=1):
        state, _ = step(state, batch)
    there = (dict(state.params), dict(state.buffers), dict(state.slots))
    assert device_names(there) == seen == {NAME}


@pytest.mark.cuda
def test_what_a_ready_optimizer_has_comes_to_the_device_with_its_model():
    """Beside the parameters, and its counts where its kernel reads them."""
    for fused in (False, True):
        model = nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.125, fused=fused)
        for _ in range(2):
            model(INPUTS).square().mean().backward()
            optimizer.step()
        state = af.TrainState.create(model=model, optimizer=optimizer)
        entry = state.opt_state["weight"]
        assert entry["exp_avg"].device == state.params["weight"].device == DEVICE
        assert entry["step"].device.type == (NAME if fused else "cpu")
        state, _ = af.make_step(mean_square)(state, INPUTS.to(DEVICE))
        assert state.opt_state["weight"]["step"] == 3


def test_the_gradients_of_a_pass_come_from_the_device_s_own_thread():
    """Which is what makes this device one: on simulated ranks they come from the rank's."""

    def run(world: af.World) -> int:
        threads: list[int] = []
        state = create(world, setup=af.chain(af.shard_data(), af.wrap_ddp()))

        def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
            hidden = model[0](batch)
            hidden.register_hook(lambda _: threads.append(threading.get_ident()))
            return hidden.square().mean() + 0 * mean_square(model, batch)

        step = af.make_step(loss_fn)
        state, _ = step(state, next(iter(af.batches(state))))
        return threads[0]

    def is_its_own(world: af.World) -> bool:
        return run(world) == threading.get_ident()

    assert run(af.World.single()) != threading.get_ident()
    assert simulate(2, is_its_own, device=NAME).results == (True, True)


def test_draws_on_the_device_come_from_keys_and_leave_its_generator():
    """The same key draws the same there, whatever was drawn before or after."""
    found = []
    for _ in range(2):
        before = torch.rand(3, device=DEVICE)
        own = MODULE.get_rng_state()
        with draws.seeded(draws.key("a"), DEVICE):
            found.append(torch.rand(3, device=DEVICE).tolist())
        assert torch.equal(own, MODULE.get_rng_state())
        del before
    with draws.seeded(draws.key("b"), DEVICE):
        assert torch.rand(3, device=DEVICE).tolist() != found[0]
    assert found[0] == found[1]


def test_each_simulated_rank_has_a_generator_of_its_own_on_the_device():
    """What it draws depends on the seed and the rank, not on whose turn it is."""

    def run(world: af.World) -> list[float]:
        drawn = []
        for _ in range(3):
            drawn += torch.rand(2, device=world.device).tolist()
            af.barrier(world)
        return drawn

    own = MODULE.get_rng_state()
    first = simulate(2, run, device=NAME)
    again = simulate(2, run, device=NAME, schedule=[1, 0, 1, 1, 0])
    assert first.results == again.results
    assert first[0] != first[1]
    assert simulate(2, run, device=NAME, seed=1).results != first.results
    assert torch.equal(own, MODULE.get_rng_state())
    with pytest.raises(
        af.errors.ArgumentError, match='also="processes", device=.*Gloo'
    ):
        simulate(2, run, device=NAME, also="processes")
    with pytest.raises(af.errors.WorldError, match="needs the device xpu:0"):
        simulate(2, run, device="xpu")


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_checkpoint_goes_on_on_any_device(tmp_path, asynchronous):
    """What is saved on the accelerator is loaded on the CPU and back, bitwise, and goes on."""
    setup = af.chain(af.ema(0.5), af.skip_nonfinite())
    state, saved = train(create(setup=setup), 3), tmp_path / "saved"
    if asynchronous:
        with af.CheckpointStore(tmp_path, async_=True) as store:
            saved = store.save(state)
            state = train(state, 2)
    else:
        af.save(state, saved)
        state = train(state, 2)
    cpu = af.World.single(device="cpu")
    there = af.load(create(cpu, setup=setup, seed=1), saved)
    back = af.load(create(setup=setup, seed=1), saved)
    assert device_names((dict(there.params), dict(there.slots))) == {"cpu"}
    assert device_names((dict(back.params), dict(back.slots))) == {NAME}
    assert different(on_cpu(there), on_cpu(back)) == []
    # hardware draws what is dropped in its own way
    for each in (there, back) if IS_FAKE else (back,):
        assert near(on_cpu(train(each, 2)), on_cpu(state))


def test_a_batch_on_another_device_is_named():
    """A value that the caller did not move, in a sentence; one that the loss moves is no error."""
    state, step = create(), af.make_step(mean_square)
    with pytest.raises(
        af.errors.BatchError, match=rf"tensors on cpu, but the state is on {NAME}:0"
    ):
        step(state, INPUTS[:4])
    moved = af.make_step(lambda model, batch: mean_square(model, batch.to(DEVICE)))
    moved(state, INPUTS[:4])

    def wrong(model: nn.Module, batch: Any) -> torch.Tensor:
        return mean_square(model, batch).view(7)

    with pytest.raises(RuntimeError, match="invalid for input") as caught:
        af.make_step(wrong)(create(), INPUTS[:4].to(DEVICE))
    assert not isinstance(caught.value, af.errors.BatchError)


def test_the_memory_that_was_had_is_asked_of_the_device(monkeypatch):
    """A device that does not count is named."""
    world = af.World.single()
    assert af.track.peak_memory_bytes(world) == MODULE.max_memory_allocated()
    devices.give_back_memory(world.device)
    monkeypatch.delattr(type(MODULE) if IS_FAKE else MODULE, "max_memory_allocated")
    with pytest.raises(
        af.errors.WorldError, match=f"torch.{NAME} does not report its peak memory"
    ):
        af.track.peak_memory_bytes(world)


def test_two_devices_in_one_operation_are_refused():
    """As on any accelerator; a number may be the host's."""
    there = torch.ones(2, device=DEVICE)
    assert (there + torch.tensor(1.0)).tolist() == [2.0, 2.0]
    with pytest.raises(RuntimeError, match="same device"):
        there + torch.ones(2)
