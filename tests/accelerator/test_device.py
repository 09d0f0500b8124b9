# SPDX-License-Identifier: Apache-2.0
"""States, batches, draws and checkpoints on an accelerator, and what it refuses."""

import tempfile
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import nn, optim

import accelfn as af
from accelfn.testing import simulate
from tests.accelerator.tested_device import (
    DEVICE,
    IS_FAKE,
    NAME,
    device_names,
    different,
    near,
    on_cpu,
    waits,
)
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
        data=af.Data(INPUTS, global_batch_size=8, shuffle=True),
        world=world or af.World.single(),
        **{"optimizer": partial(optim.AdamW, lr=0.125), **options},
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


# what goes on from a save lies where it lay, so that the host waits for no more

_HALF = partial(optim.Adam, lr=0.1, fused=True)
OPTIMIZERS: dict[str, Callable[..., optim.Optimizer]] = {
    "sgd": partial(optim.SGD, lr=0.1, momentum=0.5),
    "adam": partial(optim.Adam, lr=0.1),
    "adamw": partial(optim.AdamW, lr=0.1, foreach=False),
    "fused": partial(optim.AdamW, lr=0.1, fused=True),
    "captured": partial(optim.AdamW, lr=0.1, capturable=True),
    "nadam": partial(optim.NAdam, lr=0.1),
    "captured nadam": partial(optim.NAdam, lr=0.1, capturable=True),
    "radam": partial(optim.RAdam, lr=0.1),
    "adamax": partial(optim.Adamax, lr=0.1),
    "adadelta": partial(optim.Adadelta, lr=0.1),
    "adagrad": partial(optim.Adagrad, lr=0.1),
    "adafactor": partial(optim.Adafactor, lr=0.1),
    "rmsprop": partial(optim.RMSprop, lr=0.1, momentum=0.5),
    "rprop": partial(optim.Rprop, lr=0.1),
    "asgd": partial(optim.ASGD, lr=0.1),
    "of two kinds": af.combine_optimizers(
        (lambda name, _param: "bias" in name, _HALF),
        (..., partial(optim.NAdam, lr=0.1)),
    ),
}
SETUPS = {
    "plain": af.identity(),
    "averaged": af.chain(af.ema(0.5), af.skip_nonfinite()),
    "split": af.chain(af.shard_data(), af.wrap_fsdp()),
    "on the host": af.chain(af.shard_data(), af.wrap_fsdp(cpu_offload=True)),
}
WHOLE = ("plain", "averaged")


def with_table(kind: str, setup: str, world: af.World, seed: int = 0) -> af.TrainState:
    """Return a state with something of the caller's in it, on the host."""
    options = {"optimizer": OPTIMIZERS[kind], "setup": SETUPS[setup], "seed": seed}
    state = create(world, **options)
    return state.with_slot("table", {"rows": torch.arange(3.0), "name": "mine"})


def places(tree: Any, path: str = "") -> dict[str, torch.device]:
    """Return where each tensor is."""
    if isinstance(tree, torch.Tensor):
        return {path: tree.device}
    items = tree.items() if hasattr(tree, "items") else ()
    return {
        at: device
        for key, value in items
        for at, device in places(value, f"{path}.{key}").items()
    }


def all_places(state: af.TrainState) -> dict[str, torch.device]:
    fields = ("params", "buffers", "opt_state", "slots")
    return places({name: getattr(state, name) for name in fields})


def num_waits(state: af.TrainState) -> int:
    """Return how often a steady step waits."""
    step, batch = af.make_step(mean_square), INPUTS[:8].to(DEVICE)
    for _ in range(2):
        state, _ = step(state, batch)
    with waits() as found:
        step(state, batch)
    return len(found)


PARTS = ["params", "buffers", "opt_state", "step", "slots"]
WAYS: dict[str, Callable[..., af.TrainState]] = {
    "loaded": af.load,
    "in part": lambda fresh, folder: af.load_part(fresh, folder, PARTS).state,
    "along": lambda fresh, folder: af.with_world(af.load(fresh, folder), fresh.world),
}


@example(kind="fused", setup="plain", way="loaded", came_from=NAME, has_begun=False)
@example(  # it is tried on the host, where nothing is captured
    kind="captured", setup="split", way="loaded", came_from=NAME, has_begun=False
)
@settings(max_examples=40)
@given(
    kind=st.sampled_from(sorted(OPTIMIZERS)),
    setup=st.sampled_from(sorted(SETUPS)),
    way=st.sampled_from(sorted(WAYS)),
    came_from=st.sampled_from([NAME, "cpu"]),
    has_begun=st.booleans(),
)
def test_what_goes_on_lies_where_it_lay(
    kind: str, setup: str, way: str, came_from: str, has_begun: bool
) -> None:
    """Counts that the host reads are on the host, and all else is where it was made."""
    assume(kind != "adafactor" or setup in WHOLE)
    assume("captured" not in kind or setup != "on the host")
    size = 1 if setup in WHOLE else 2
    if setup == "on the host" or "captured" in kind:
        came_from = NAME  # on the CPU these cannot be

    def told(state: af.TrainState) -> tuple[Any, int]:
        return all_places(state), num_waits(state) if size == 1 else 0

    def begins(world: af.World, folder: str) -> tuple[Any, int]:
        state = train(with_table(kind, setup, world), 2)
        af.save(state, folder)
        return told(state) if world.device.type == NAME else ({}, 0)

    def goes_on(world: af.World, folder: str) -> tuple[Any, int]:
        fresh = with_table(kind, setup, world, seed=1)
        fresh = train(fresh, 1) if has_begun else fresh
        return told(WAYS[way](fresh, folder))

    with tempfile.TemporaryDirectory() as parent:
        here, there = f"{parent}/here", f"{parent}/{came_from}"
        expected = simulate(size, partial(begins, folder=here), device=NAME)
        if came_from == NAME:
            there = here
        else:
            simulate(size, partial(begins, folder=there))
        found = simulate(size, partial(goes_on, folder=there), device=NAME)
    for (places_now, waits_now), (were, waited) in zip(found, expected, strict=True):
        assert places_now == were
        assert waits_now <= waited


@given(
    kind=st.sampled_from(sorted(k for k in OPTIMIZERS if "captured" not in k)),
    begun_here=st.booleans(),
)
def test_what_goes_to_a_device_lies_as_if_it_had_begun_there(
    kind: str, begun_here: bool
) -> None:
    """From the host to the device and back, with all that is in slots."""
    worlds = {each: af.World.single(device=each) for each in (NAME, "cpu")}
    one, two = (NAME, "cpu") if begun_here else ("cpu", NAME)
    state = train(with_table(kind, "averaged", worlds[one]), 2)
    moved = af.with_world(state, worlds[two])
    table = {".slots.table.rows": worlds[two].device}
    alike = all_places(train(with_table(kind, "averaged", worlds[two]), 2))
    assert all_places(moved) == alike | table
