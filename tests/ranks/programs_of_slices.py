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
from tests.internals import GradInfo, Update

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


def load(world: af.World, folder: Path, *, flipped: bool = False) -> dict[str, Any]:
    """Load into a state that is sharded, in the same way or another."""
    return found(af.load(sharded(world, flipped=flipped, zeros=True), folder))


def load_plain(world: af.World, folder: Path) -> dict[str, Any]:
    """Load into a state that is not."""
    return found(af.load(fresh(world), folder))


def save_plain(world: af.World, old: Path, new: Path) -> None:
    """Save what was loaded into a state that is not sharded."""
    af.save(af.load(fresh(world), old), new)


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


def clipped(world: af.World, norm_type: float) -> tuple[float, dict[str, torch.Tensor]]:
    """Clip gradients of which some are sharded; return their norm, and them whole."""
    mesh = init_device_mesh("cpu", (world.size,))
    tensors = {
        name: distribute_tensor(whole(name).double() / 64 - 1, mesh, [place])
        for name, (_, place) in PLACES.items()
    }
    tensors["plain"] = torch.tensor([3.0, -4.0], dtype=torch.float64)
    clip = af.clip_grad_norm(0.5, norm_type=norm_type)
    grads, state = (
        af.Grads(tensors=tensors, taken=GradInfo(divisor=1), reduced=True),
        fresh(world),
    )
    update = Update(state=state, slots=dict(state.slots), grads=grads)
    grads, _ = clip.grads(grads, None, update)
    found = {
        name: each.full_tensor() if name in PLACES else each
        for name, each in grads.tensors.items()
    }
    return float(grads.metrics["grad_norm"]), found
