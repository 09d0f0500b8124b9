# SPDX-License-Identifier: Apache-2.0
"""Whole tensors of those of which each rank has a part; many of them in one call."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from accelfn.base import shards
from accelfn.collectives.naming import naming
from accelfn.collectives.packed import all_gather
from accelfn.world import World
from accelfn.world.folding import folded

_MOST = 32 << 20
"""Bytes of whole tensors that one call gathers, or those of one that is larger."""


def wholes(
    tensors: Mapping[str, torch.Tensor], world: World, *, label: str
) -> dict[str, torch.Tensor]:
    """Return tensors of which each rank has all; those that are parts are gathered.

    What `by_calls` yields, and plain tensors as they are.
    """
    found = dict(tensors)
    for some in by_calls(tensors, world, label=label):
        found |= some
    return found


def by_calls(
    tensors: Mapping[str, torch.Tensor], world: World, *, label: str
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the wholes of those tensors that are parts, as many at once as one call gathers.

    A collective of all ranks, all of which go through it to its end.

    Args:
        tensors: by name, the same on all ranks.
        world: whose ranks have the parts.
        label: what the ranks are doing.

    The wholes lie on the world's device, where parts may not be.

    Law: bitwise what was cut.

    Cost: of each axis along which they are cut, a gather for every 32 MiB of whole tensors of
        one dtype, twice as many at most; of a tensor that a user has cut in another way than a
        layout does, those of torch.
    """
    parts: dict[str, Any] = {n: t for n, t in tensors.items() if shards.is_shard(t)}
    if not parts:
        return
    axes = folded(world)
    mesh = axes.mesh if axes.size > 1 else None
    ours = {n: t for n, t in parts.items() if t.device_mesh == mesh and _in_turn(t)}
    for names in _together(ours):
        yield _gathered({n: ours[n] for n in names}, axes, label)
    for name, tensor in parts.items():
        if name not in ours:  # a user's own
            with naming(label, world):
                whole = tensor.full_tensor()
            yield {name: whole}


def _in_turn(tensor: Any) -> bool:
    """Whether a tensor is cut as layouts cut: along the last axis first, the parts further.

    Of a dim that is cut along two axes, the parts that are cut further are of one length.
    """
    placed = list(enumerate(tensor.placements))
    for place, placement in placed:
        if placement.is_replicate():
            continue
        if type(placement).__name__ not in ("Shard", "_StridedShard"):
            return False  # summands
        dim = placement.dim
        later = [i for i, each in placed[place + 1 :] if each.is_shard(dim)]
        count = math.prod(tensor.device_mesh.size(i) for i in later)
        even = tensor.shape[dim] % count == 0
        if getattr(placement, "split_factor", 1) != count or not even:
            return False
    return True


def _together(tensors: Mapping[str, Any]) -> Iterator[list[str]]:
    """Yield the names of parts that are gathered in the same calls."""
    alike: dict[Any, list[str]] = {}
    for name, tensor in tensors.items():
        alike.setdefault((tensor.dtype, shards.cut_axes(tensor)), []).append(name)
    for names in alike.values():
        size, taken = 0, list[str]()
        for name in names:
            nbytes = tensors[name].numel() * tensors[name].element_size()
            if taken and size + nbytes > _MOST:
                yield taken
                size, taken = 0, []
            taken.append(name)
            size += nbytes
        yield taken


def _gathered(
    tensors: Mapping[str, Any], world: World, label: str
) -> dict[str, torch.Tensor]:
    """Gather tensors of one dtype that are cut along the same axes, axis by axis."""
    parts = {name: shards.local(tensor).detach() for name, tensor in tensors.items()}
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    axes = shards.cut_axes(next(iter(tensors.values())))
    for axis in axes:  # a part along "dp_shard" is one of a part along "tp"
        ranks = world.along(axis)
        cuts = {n: _dim(tensor, axis) for n, tensor in tensors.items()}
        inner = {
            n: _inner(tensor, axes[axes.index(axis) + 1 :], cuts[n], world)
            for n, tensor in tensors.items()
        }
        lengths = {n: shapes[n][cuts[n]] // inner[n] for n in parts}
        parts = _along(parts, cuts, lengths, ranks, label)
    return parts


def _dim(tensor: Any, axis: str) -> int:
    """Return the dim at which a tensor is cut along an axis."""
    place = tensor.device_mesh.mesh_dim_names.index(axis)
    return tensor.placements[place].dim


def _inner(tensor: Any, axes: tuple[str, ...], dim: int, world: World) -> int:
    """Return into how many parts a dim is cut along further axes, which is evenly."""
    count = 1
    for axis in axes:
        count *= world.along(axis).size if _dim(tensor, axis) == dim else 1
    return count


def _along(
    parts: Mapping[str, torch.Tensor],
    dims: Mapping[str, int],
    lengths: Mapping[str, int],
    ranks: World,
    label: str,
) -> dict[str, torch.Tensor]:
    """Return what ranks have together of tensors that are cut as `torch.chunk` does.

    Args:
        parts: of this rank.
        dims: at which each is cut.
        lengths: of all parts together, at that dim.
        ranks: those that have the parts, in order.
        label: what they are doing.
    """
    rooms = {n: -(-lengths[n] // ranks.size) for n in parts}  # of the first rank
    sent = [_padded(part, dims[n], rooms[n]) for n, part in parts.items()]
    flat = torch.cat([each.reshape(-1) for each in sent]).to(ranks.device)
    rows = all_gather(flat, ranks, label=label)
    of_each = zip(*(row.split([e.numel() for e in sent]) for row in rows), strict=True)
    found: dict[str, torch.Tensor] = {}
    for name, like, got in zip(parts, sent, of_each, strict=True):
        dim, room, left = dims[name], rooms[name], lengths[name]
        ends = [min(max(left - i * room, 0), room) for i in range(ranks.size)]
        each = zip(got, ends, strict=True)
        trimmed = [part.view(like.shape).narrow(dim, 0, end) for part, end in each]
        found[name] = torch.cat(trimmed, dim).contiguous()
    return found


def _padded(part: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    """Return a part that is as long as the longest one."""
    if part.shape[dim] == length:
        return part.contiguous()
    shape = [*part.shape]
    shape[dim] = length
    made = part.new_zeros(shape)
    made.narrow(dim, 0, part.shape[dim]).copy_(part)
    return made
