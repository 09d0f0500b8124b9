# SPDX-License-Identifier: Apache-2.0
"""Sharded tensors on real ranks: saved on some, loaded on others, cut otherwise, and back."""

from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
)

import accelfn as af
from tests.internals import read_manifest
from tests.processes import run_ranks

pytestmark = pytest.mark.ranks(2)

PLACES = {
    "rows": ((5, 3), Shard(0)),
    "columns": ((2, 3), Shard(1)),
    "fewer than ranks": ((1, 4), Shard(0)),
    "nothing": ((0, 3), Shard(0)),
    "whole": ((3, 2), Replicate()),
    "large": ((4, 4), Shard(1)),
}


def whole(name: str) -> torch.Tensor:
    """Return a tensor before it is sharded."""
    shape, _ = PLACES[name]
    start = 100.0 * list(PLACES).index(name)
    numbers = torch.arange(start, start + torch.Size(shape).numel()).reshape(shape)
    return numbers.to(torch.bfloat16) if name == "columns" else numbers


EXPECTED = {name: whole(name) for name in PLACES} | {
    "weight": torch.arange(15.0).reshape(5, 3),
    "bias": torch.ones(5),
}


def fresh(world: af.World) -> af.TrainState:
    """Return a state without sharded tensors."""
    return af.TrainState.create(
        model=partial(torch.nn.Linear, 3, 5),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        world=world,
    )


def sharded(world, *, flipped=False, zeros=False) -> af.TrainState:
    """Return a state with them, in its parameters and in a slot; flipped: cut otherwise."""
    mesh = init_device_mesh("cpu", (world.size,))

    def distributed(name: str, place: Any) -> torch.Tensor:
        if flipped and place.is_shard():
            place = Shard(1 - place.dim)
        tensor = torch.zeros_like(EXPECTED[name]) if zeros else EXPECTED[name]
        return distribute_tensor(tensor, mesh, [place])

    bias = torch.zeros(5) if zeros else torch.ones(5)
    params = {"weight": distributed("weight", Shard(0)), "bias": bias}
    state = attrs.evolve(fresh(world), params=params)
    slot = {name: distributed(name, place) for name, (_, place) in PLACES.items()}
    return state.with_slot("mine", {"in": slot, "again": slot["rows"]})


def found(state: af.TrainState) -> dict[str, Any]:
    """Return a state's tensors, assembled; and which of them were sharded."""
    slot = state.slots["mine"]
    assert slot["again"] is slot["in"]["rows"]
    return {
        name: (type(t).__name__, t.full_tensor() if isinstance(t, DTensor) else t)
        for name, t in {**slot["in"], **state.params}.items()
    }


def save(world: af.World, folder: Path, *, async_: bool = False) -> None:
    """Save a state with sharded tensors."""
    if not async_:
        af.save(sharded(world), folder)
        return
    with af.CheckpointStore(folder) as store:
        store.save(sharded(world))


def load(world, folder, *, flipped=False, back="") -> list[dict[str, Any]]:
    """Load into a state that is sharded, in the same way or another, and into one that is not.

    That one is saved again in a folder `back`.
    """
    split = af.load(sharded(world, flipped=flipped, zeros=True), folder)
    plain = af.load(fresh(world), folder)
    if back:
        af.save(plain, back)
    return [found(split), found(plain)]


def assert_all_there(found: dict[str, Any], *, sharded: bool) -> None:
    """Assert that a rank has every tensor, bitwise, in the kind that it should."""
    assert EXPECTED.keys() == found.keys()
    for name, (kind, tensor) in found.items():
        assert kind == ("DTensor" if sharded and name != "bias" else "Tensor"), name
        assert EXPECTED[name].dtype == tensor.dtype, name
        assert torch.equal(EXPECTED[name], tensor), name


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint of sharded tensors on two ranks."""
    folder = tmp_path_factory.mktemp("slices") / "saved"
    run_ranks(2, save, folder)
    return folder


@pytest.mark.ranks(3)
def test_there_and_back(saved, tmp_path):
    """L47: cut and saved in any way, and loaded on any ranks, each rank has its slice."""
    back = tmp_path / "plain"
    run_ranks(2, partial(save, async_=True), tmp_path / "runs")
    for folder, size, flipped in (
        *((saved, 2, False), (saved, 2, True), (saved, 1, False), (saved, 3, False)),
        *((back, 2, False), (back, 3, False)),
        (tmp_path / "runs" / "step-00000000", 2, False),
    ):
        last = str(back) if size == 1 else ""
        program = partial(load, flipped=flipped, back=last)
        for split, plain in run_ranks(size, program, folder):
            assert_all_there(split, sharded=True)
            assert_all_there(plain, sharded=False)


def test_each_rank_writes_its_slices(saved):
    """No slice is written twice, nor any that has nothing in it."""
    manifest = read_manifest(saved)
    held = {rank: set(file.tensors) for rank, file in manifest.files.items()}
    places = {name: set(each["slices"]) for name, each in manifest.sharded.items()}
    by_name = {name.rpartition(".")[2]: place for name, place in places.items()}
    first, second = sorted(held)
    assert by_name["rows"] == by_name["columns"] == by_name["weight"] == {first, second}
    assert by_name["whole"] == {first}
    for name, place in places.items():
        assert {rank for rank in held if name in held[rank]} == place


def refused(world: af.World, saved: Path, folder: Path) -> list[str]:
    """Return why another shape is not loaded, and why summands are not saved."""
    mesh = init_device_mesh("cpu", (world.size,))
    other = distribute_tensor(torch.zeros(7, 3), mesh, [Shard(0)])
    state = sharded(world).with_slot("mine", {"in": {"rows": other}})
    with pytest.raises(af.errors.CheckpointError) as shape:
        af.load(state, saved)
    summand = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    with pytest.raises(af.errors.CheckpointError) as summed:
        af.save(fresh(world).with_slot("mine", summand), folder)
    return [str(shape.value), str(summed.value)]


def test_what_no_file_can_have(saved, tmp_path):
    """C17: another shape, with both, and a tensor of summands are refused by name on all ranks."""
    for shape, summed in run_ranks(2, refused, saved, tmp_path / "saved"):
        assert "slots.mine.in.rows was saved as (5, 3)" in shape
        assert "(7, 3)" in shape
        assert "slots.mine is a DTensor with the placement" in summed
        assert "redistribute" in summed
    assert not (tmp_path / "saved").exists()
