# SPDX-License-Identifier: Apache-2.0
"""Programs of ranks that hold sharded tensors, and save and load them."""

from functools import partial
from pathlib import Path
from typing import Any

import attrs
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

import accelfn as af

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

    def distributed(tensor: torch.Tensor, place: Any) -> torch.Tensor:
        if flipped and place.is_shard():
            place = Shard(1 - place.dim)
        tensor = torch.zeros_like(tensor) if zeros else tensor
        return distribute_tensor(tensor, mesh, [place])

    state = fresh(world)
    weight = torch.arange(15.0).reshape(5, 3)
    state = attrs.evolve(
        state,
        params={
            "weight": distributed(weight, Shard(0)),
            "bias": torch.zeros(5) if zeros else torch.ones(5),
        },
    )
    slot = {
        name: distributed(whole(name), place) for name, (_, place) in PLACES.items()
    }
    return state.with_slot("mine", {"in": slot, "again": slot["rows"]})


def found(state: af.TrainState) -> dict[str, Any]:
    """Return a state's tensors, assembled; and which of them were sharded."""
    slot = state.slots["mine"]
    tensors = {**slot["in"], **state.params}
    return {
        name: (
            type(tensor).__name__,
            tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor,
        )
        for name, tensor in tensors.items()
    } | {"is one": slot["again"] is slot["in"]["rows"]}


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


def load_other_shape(world: af.World, folder: Path) -> str:
    """Load into a sharded tensor of another shape."""
    mesh = init_device_mesh("cpu", (world.size,))
    other = distribute_tensor(torch.zeros(7, 3), mesh, [Shard(0)])
    state = sharded(world).with_slot("mine", {"in": {"rows": other}})
    try:
        af.load(state, folder)
    except af.errors.CheckpointError as error:
        return str(error)
    return ""


def save_summands(world: af.World, folder: Path) -> str:
    """Save a tensor of which every rank has a summand."""
    mesh = init_device_mesh("cpu", (world.size,))
    summand = torch.distributed.tensor.DTensor.from_local(
        torch.ones(2), mesh, [Partial()]
    )
    try:
        af.save(fresh(world).with_slot("mine", summand), folder)
    except af.errors.CheckpointError as error:
        return str(error)
    return ""
