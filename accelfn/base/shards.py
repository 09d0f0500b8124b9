# SPDX-License-Identifier: Apache-2.0
"""Tensors of which each rank holds a part: torch's DTensors, without its operators.

An operator on a DTensor costs 0.1 ms, and milliseconds at first sight of each shape. What is
done element by element is done on the part that a rank holds.
"""

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that this rank holds: of a plain one, itself."""
    if type(tensor) is torch.Tensor:
        return tensor
    return getattr(tensor, "_local_tensor", tensor)


def have_shards(tensors: Iterable[Any]) -> bool:
    """Whether one of them is a DTensor."""
    return any(map(is_shard, tensors))


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Return whether a tensor, or a rank's part of it, is of a class made of other tensors."""
    return is_traceable_wrapper_subclass(local(tensor))


def is_shard(tensor: Any) -> bool:
    """Whether it is a DTensor."""
    return hasattr(tensor, "_local_tensor")


def split_as(tensor: Any, other: Any) -> Any:
    """Return a DTensor that lies on the ranks as another does.

    What operators of torch make of a DTensor may lie otherwise, as a sum that each rank has a
    part of. Cost: none where it lies so; else what torch communicates.
    """
    if type(tensor) is torch.Tensor or not (is_shard(tensor) and is_shard(other)):
        return tensor
    if tensor.placements == other.placements:
        return tensor
    return tensor.redistribute(placements=other.placements)


def cut_axes(tensor: Any) -> tuple[str, ...]:
    """Return the axes along which a tensor is cut: of a plain one, none."""
    if not is_shard(tensor):
        return ()
    names = tensor.device_mesh.mesh_dim_names or ()  # a user's mesh may have none
    placed = zip(names, tensor.placements, strict=False)
    return tuple(name for name, placement in placed if not placement.is_replicate())


def computes_on(tensor: Any) -> str:
    """Return on what kind of device a parameter is computed with; its part may lie elsewhere."""
    return tensor.device_mesh.device_type if is_shard(tensor) else tensor.device.type


def with_local(tensor: Any, part: torch.Tensor) -> torch.Tensor:
    """Return a tensor that lies over the ranks as another does, of which this is the part."""
    from torch.distributed.tensor import DTensor  # noqa: PLC0415 - rarely needed

    spec = tensor._spec
    if part.dtype is not spec.tensor_meta.dtype:
        spec = copy.copy(spec)
        spec.tensor_meta = spec.tensor_meta._replace(dtype=part.dtype)
    return DTensor(part, spec, requires_grad=False)  # pyright: ignore[reportCallIssue]


def room(part: torch.Tensor) -> int:
    """Return how many elements there is memory for behind a part."""
    end = part.untyped_storage().nbytes() // part.element_size()
    return int(end - part.storage_offset())


def padded(part: torch.Tensor, count: int) -> torch.Tensor:
    """Return a copy of a part with room for so many elements behind its corner."""
    memory = part.new_zeros(max(count, part.numel()))
    return memory[: part.numel()].view(part.shape).copy_(part)


def copied(tensor: Any) -> torch.Tensor:
    """Return a DTensor of the same numbers, with as much room."""
    part = local(tensor)
    return with_local(tensor, padded(part.detach(), room(part)))
