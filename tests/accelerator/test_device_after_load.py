# SPDX-License-Identifier: Apache-2.0
"""What goes on from a save lies where it lay, and so the host waits for no more than before."""

import tempfile
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
from tests.accelerator.test_device import mean_square, train
from tests.accelerator.tested_device import DEVICE, NAME, waits

pytestmark = pytest.mark.gpu
INPUTS = torch.linspace(-1, 1, 96).view(32, 3)
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


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))


def create(kind: str, setup: str, world: af.World, seed: int = 0) -> af.TrainState:
    """Return a state with something of the caller's in it, on the host."""
    state = af.TrainState.create(
        model=net,
        optimizer=OPTIMIZERS[kind],
        data=af.Data(INPUTS, global_batch_size=8),
        setup=SETUPS[setup],
        world=world,
        seed=seed,
    )
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


def loaded(fresh: af.TrainState, folder: str) -> af.TrainState:
    return af.load(fresh, folder)


def taken_in_part(fresh: af.TrainState, folder: str) -> af.TrainState:
    only = ["params", "buffers", "opt_state", "step", "slots"]
    return af.load_part(fresh, folder, only).state


def taken_along(fresh: af.TrainState, folder: str) -> af.TrainState:
    return af.with_world(af.load(fresh, folder), fresh.world)


WAYS = {each.__name__: each for each in (loaded, taken_in_part, taken_along)}


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
        state = train(create(kind, setup, world), 2)
        af.save(state, folder)
        return told(state) if world.device.type == NAME else ({}, 0)

    def goes_on(world: af.World, folder: str) -> tuple[Any, int]:
        fresh = create(kind, setup, world, seed=1)
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
    state = train(create(kind, "averaged", worlds[one]), 2)
    moved = af.with_world(state, worlds[two])
    table = {".slots.table.rows": worlds[two].device}
    alike = all_places(train(create(kind, "averaged", worlds[two]), 2))
    assert all_places(moved) == alike | table
