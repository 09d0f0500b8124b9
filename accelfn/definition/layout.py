# SPDX-License-Identifier: Apache-2.0
"""`Layout`: the mesh axes and the dims along which each parameter is sharded.

The layout shards a state's parameters, and each entry of the optimizer's state or of a slot
with a parameter's name and shape. Sharded values are torch DTensors with the full shape.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, Self, TypeAlias, cast

import attrs
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.utils._python_dispatch import TorchDispatchMode

from accelfn.base import tree
from accelfn.base.tree import Pending
from accelfn.collectives.replicas import by_calls
from accelfn.definition.transform import facts_of
from accelfn.errors import ArgumentError
from accelfn.world import World
from accelfn.world.world import fold_axes

# pyright: reportPrivateUsage=false

# Axes and dims of sharding, and the size of a shard.


Cuts: TypeAlias = Mapping[str, int]
"""How a parameter is sharded: from the name of an axis to the sharded dim."""


def cuts_of(
    owners: Sequence[Any], metas: Mapping[str, torch.Tensor], axes: Mapping[str, int]
) -> dict[str, Cuts]:
    """Combine the layouts of transforms; return how each sharded parameter is sharded.

    Args:
        owners: the transforms with a method `layout`.
        metas: the parameters by name, on the meta device.
        axes: the number of ranks along each axis.
    """
    cuts = {
        name: {
            axis: dim
            for owner in owners
            for axis, dim in (owner.layout(name, meta, axes) or {}).items()
            if axes.get(axis, 1) > 1
        }
        for name, meta in metas.items()
    }
    return {name: along for name, along in cuts.items() if along}


def largest_part(
    shape: Iterable[int], cuts: Cuts, axes: Mapping[str, int]
) -> torch.Size:
    """Return the shape of the largest shard, which is the shard of the first rank."""
    lengths = list(shape)
    for axis, dim in cuts.items():
        lengths[dim] = -(-lengths[dim] // axes[axis])
    return torch.Size(lengths)


# this file uses a private placement of torch, because a dim may be sharded along two axes


@attrs.frozen
class Layout:
    """How a model is sharded over the ranks. Layouts with equal shards are equal.

    Attributes:
        mesh: the device mesh.
        device: the device of the shards; the CPU if a transform offloads them.
        cuts: for each sharded parameter's name, the dim that is sharded along each axis.
        shapes: the full shapes of all parameters, by name.
    """

    mesh: DeviceMesh
    device: torch.device
    cuts: Mapping[str, Cuts]
    shapes: Mapping[str, torch.Size] = attrs.field(eq=False)

    @classmethod
    def of(
        cls, owners: Sequence[Any], metas: Mapping[str, torch.Tensor], world: World
    ) -> Self | None:
        """Create the combined layout of transforms; None if no parameter is sharded."""
        world = fold_axes(world)
        cuts = cuts_of(owners, metas, world.axes)
        if not cuts:
            return None
        shapes = {name: meta.shape for name, meta in metas.items()}
        on_host = any("offloads" in facts_of(owner) for owner in owners)
        device = torch.device("cpu") if on_host else world.device
        return cls(world.mesh, device, cuts, shapes)

    def spec(self, name: str, like: torch.Tensor) -> DTensorSpec:
        """Return the DTensorSpec of a parameter, or of a tensor with its shape."""
        cuts = self.cuts[name]
        placements = tuple(self._placement(cuts, axis) for axis in self._axes)
        meta = TensorMeta(like.shape, like.stride(), like.dtype)
        return DTensorSpec(self.mesh, placements, tensor_meta=meta)

    def _placement(self, cuts: Cuts, axis: str) -> Placement:
        if axis not in cuts:
            return Replicate()
        dim, first = cuts[axis], cuts.get("tp")
        if axis == "dp_shard" and first == dim:  # shards a shard along "tp" again
            return _StridedShard(dim, split_factor=self._axes["tp"])
        return Shard(dim)

    @cached_property
    def _axes(self) -> dict[str, int]:
        names = cast("tuple[str, ...]", self.mesh.mesh_dim_names)
        return dict(zip(names, self.mesh.shape, strict=True))

    @cached_property
    def of_layers(self) -> "Layout":
        """Return the layout of parameters during computation: sharded only along "tp"."""
        cuts = {n: {"tp": c["tp"]} for n, c in self.cuts.items() if "tp" in c}
        return attrs.evolve(self, cuts=cuts)

    def computed(self, name: str) -> torch.Size:
        """Return the shape of the piece of a parameter that this rank computes with."""
        cuts = self.of_layers.cuts.get(name, {})
        return largest_part(self.shapes[name], cuts, self._axes)

    def laid(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Wrap the piece of a parameter that this rank computes with in a DTensor."""
        if name not in self.of_layers.cuts:
            return tensor
        like = torch.empty(self.shapes[name], dtype=tensor.dtype, device="meta")
        return self.of_layers.held(name, tensor, like)

    def cut(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Copy this rank's shard of a full tensor, to the layout's device.

        The shard's memory has the size of the largest shard, because FSDP gathers equal sizes.
        The full tensor may be on any device, or be a DTensor with the layout `of_layers`.
        """
        if name not in self.cuts:
            return tensor
        origin = (0,) * tensor.ndim
        if tree.is_shard(tensor):
            origin = _place(self.of_layers.spec(name, tensor))[1]
        part = _narrow(tree.local(tensor).detach(), self.spec(name, tensor), origin)
        shard = tree.pad_part(part.to(self.device), self.room(name, tensor.shape))
        return self.held(name, shard, tensor)

    def held(self, name: str, part: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Wrap this rank's shard in a DTensor with this layout, as a state stores it."""
        spec = self.spec(name, like)
        return DTensor(part, spec, requires_grad=False)  # pyright: ignore[reportCallIssue]

    def room(self, name: str, shape: torch.Size) -> int:
        """Return the number of elements of the largest shard."""
        return largest_part(shape, self.cuts[name], self._axes).numel()


def reshard_tree(
    values: Any, layout: Layout | None, shapes: Mapping[str, torch.Size], world: World
) -> Any:
    """Reshard the tensors in a tree to a layout; without a layout, return full tensors.

    If tensors are sharded, this is a collective. Sharding full tensors needs no communication.
    """
    leaves: list[tuple[torch.Tensor, str | None]] = []
    _map_named(values, shapes, lambda tensor, name: leaves.append((tensor, name)))

    def laid(tensor: torch.Tensor, name: str | None) -> torch.Tensor:
        if layout is None or name is None or tensor.shape != shapes[name]:
            return tensor
        return layout.cut(name, tensor)

    parts = {str(i): t for i, (t, _) in enumerate(leaves) if tree.is_shard(t)}
    results = {str(i): laid(*e) for i, e in enumerate(leaves) if str(i) not in parts}
    for some in by_calls(parts, world, label="lay out anew"):
        results |= {i: laid(full, leaves[int(i)][1]) for i, full in some.items()}
    order = map(str, range(len(leaves)))
    return _map_named(values, shapes, lambda _tensor, _name: results[next(order)])


def _map_named(
    values: Any,
    shapes: Collection[str],
    fn: Callable[[torch.Tensor, str | None], Any],
    name: str | None = None,
) -> Any:
    """Call `fn(tensor, name)` for each tensor in a tree, with its parameter's name or None."""
    if isinstance(values, torch.Tensor):
        return fn(values, name)
    if isinstance(values, Mapping):
        items = cast("Mapping[Any, Any]", values).items()
        return {
            k: _map_named(v, shapes, fn, k if k in shapes else name) for k, v in items
        }
    if isinstance(values, (list, tuple)) and not hasattr(values, "_fields"):
        results = [_map_named(v, shapes, fn, name) for v in cast("list[Any]", values)]
        return results if isinstance(values, list) else tuple(results)
    if isinstance(values, Pending):
        return Pending.of(_map_named(values.wait(), shapes, fn, name))
    return values


# Random numbers for sharded tensors, equal to those for the full tensor.


_DRAWS = torch.Tag.nondeterministic_seeded
"""torch's tag for operators that use random numbers."""


class WholeDraws(TorchDispatchMode):
    """A mode that computes random numbers for full tensors, and keeps only this rank's shard.

    torch would compute random numbers only for the shard. The generators are equal on all
    ranks, so all ranks would get the same numbers.

    Cost: memory for one full tensor at a time.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operator of torch, but replace random operators on sharded tensors.

        Raises:
            ArgumentError: the random numbers depend on the values of a sharded tensor.
        """
        kwargs = kwargs or {}
        if _DRAWS not in func.tags or not any(map(_is_split, args)):
            return func(*args, **kwargs)
        like, *rest = args
        name = func._schema.name.removeprefix("aten::")
        fills = name.endswith("_")
        if not (fills or name.endswith("_like")) or any(map(_is_split, rest)):
            msg = (
                f"torch's {name} draws random numbers that depend on the values of a sharded"
                " tensor, but each rank has only its shard. Compare values with random numbers"
                " instead, as in torch.rand_like(tensor) < probability."
            )
            raise ArgumentError(msg)
        part = tree.local(like)
        full = torch.empty(like.shape, dtype=like.dtype, device=part.device)
        numbers = _narrow(func(full, *rest, **kwargs), like._spec, (0,) * like.ndim)
        if fills:
            part.copy_(numbers)
            return like
        return tree.with_local(like, tree.pad_part(numbers, tree.room(part)))


def _is_split(tensor: Any) -> bool:
    """Return whether a value is a DTensor, but not a DTensor of partial sums."""
    placements = tensor.placements if tree.is_shard(tensor) else ()
    return bool(placements) and not any(p.is_partial() for p in placements)


def _place(spec: DTensorSpec) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape and the offset of this rank's shard."""
    return compute_local_shape_and_global_offset(spec.shape, spec.mesh, spec.placements)


def _narrow(
    tensor: torch.Tensor, spec: DTensorSpec, origin: tuple[int, ...]
) -> torch.Tensor:
    """Return this rank's shard from a part of the full tensor that begins at `origin`."""
    for dim, (length, begin) in enumerate(zip(*_place(spec), strict=True)):
        start = min(begin - origin[dim], tensor.shape[dim])
        tensor = tensor.narrow(dim, start, length)
    return tensor
