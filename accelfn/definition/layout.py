# SPDX-License-Identifier: Apache-2.0
"""`Layout`: along which axes of the world each parameter is cut, and at which dim.

A state's values follow it: parameters, and whatever in the optimizer's state and in slots
stands under a parameter's name and has its shape. They are torch's DTensors, whose shape is
that of the whole.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
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
from accelfn.collectives import by_calls
from accelfn.definition.transform import facts_of
from accelfn.errors import ArgumentError
from accelfn.world import World
from accelfn.world.world import fold_axes

# pyright: reportPrivateUsage=false

# Along which axes of a world parameters are cut, and how much of them one rank has then.


Cuts: TypeAlias = Mapping[str, int]
"""By axis, the dim that is cut along it."""


def cuts_of(
    owners: Iterable[Any], metas: Mapping[str, torch.Tensor], axes: Mapping[str, int]
) -> dict[str, Cuts]:
    """Return what transforms say together, of those parameters that are cut at all.

    Args:
        owners: the transforms that have `layout`.
        metas: the parameters by name, as tensors without values.
        axes: how many ranks stand along each.
    """
    owners = list(owners)
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


def by_rows(meta: torch.Tensor) -> Cuts | None:
    """Return that rows are cut along dp_shard, if there are any, of any elements."""
    return {"dp_shard": 0} if meta.ndim and meta.numel() else None


def largest_part(
    shape: Iterable[int], cuts: Cuts, axes: Mapping[str, int]
) -> torch.Size:
    """Return the shape of the first rank's part, which none is larger than."""
    lengths = list(shape)
    for axis, dim in cuts.items():
        lengths[dim] = -(-lengths[dim] // axes[axis])
    return torch.Size(lengths)


# torch has no public word for rows of a rank's rows


@attrs.frozen(eq=False)
class Layout:
    """How a model lies over the ranks.

    Attributes:
        mesh: the axes.
        device: where parts live; the host, where a transform offloads them.
        cuts: by parameter; of those that are cut at all.
        shapes: of the whole parameters, by name.
    """

    mesh: DeviceMesh
    device: torch.device
    cuts: Mapping[str, Cuts]
    shapes: Mapping[str, torch.Size]

    @classmethod
    def of(
        cls, owners: Iterable[Any], metas: Mapping[str, torch.Tensor], world: World
    ) -> Self | None:
        """Return what transforms say together; None where nothing is cut."""
        owners, world = list(owners), fold_axes(world)
        cuts = cuts_of(owners, metas, world.axes)
        if not cuts:
            return None
        shapes = {name: meta.shape for name, meta in metas.items()}
        on_host = any("offloads" in facts_of(each) for each in owners)
        device = torch.device("cpu") if on_host else world.device
        return cls(world.mesh, device, cuts, shapes)

    def same(self, other: "Layout | None") -> bool:
        """Whether another cuts alike, and keeps parts in the same memory."""
        return other is not None and self._key == other._key

    @property
    def _key(self) -> tuple[object, ...]:
        return self.cuts, self.mesh, self.device

    def spec(self, name: str, like: torch.Tensor) -> DTensorSpec:
        """Return torch's record of how a parameter, or what has its shape, lies."""
        cuts = self.cuts[name]
        placements = tuple(self._placement(cuts, axis) for axis in self._axes)
        meta = TensorMeta(like.shape, like.stride(), like.dtype)
        return DTensorSpec(self.mesh, placements, tensor_meta=meta)

    def _placement(self, cuts: Cuts, axis: str) -> Placement:
        if axis not in cuts:
            return Replicate()
        dim, first = cuts[axis], cuts.get("tp")
        if axis == "dp_shard" and first == dim:  # rows of a rank's rows
            return _StridedShard(dim, split_factor=self._axes["tp"])
        return Shard(dim)

    @cached_property
    def _axes(self) -> dict[str, int]:
        names = cast("tuple[str, ...]", self.mesh.mesh_dim_names)
        return dict(zip(names, self.mesh.shape, strict=True))

    @cached_property
    def of_layers(self) -> "Layout":
        """What is left of it where nothing is cut but layers: how a rank computes."""
        cuts = {n: {"tp": c["tp"]} for n, c in self.cuts.items() if "tp" in c}
        return attrs.evolve(self, cuts=cuts)

    def computed(self, name: str) -> torch.Size:
        """Return the shape in which this rank computes with a parameter."""
        cuts = self.of_layers.cuts.get(name, {})
        return largest_part(self.shapes[name], cuts, self._axes)

    def laid(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return what a rank made in the shape in which it computes, as it lies."""
        if name not in self.of_layers.cuts:
            return tensor
        like = torch.empty(self.shapes[name], dtype=tensor.dtype, device="meta")
        spec = self.of_layers.spec(name, like)
        return DTensor(tensor, spec, requires_grad=False)  # pyright: ignore[reportCallIssue]

    def cut(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return what this rank holds of a tensor that all have, in memory of its own.

        It has room for as many elements as the largest part, as FSDP gathers them. The whole
        may be on any device: the part is on the layout's. Or it may lie already as ranks
        compute.
        """
        if name not in self.cuts:
            return tensor
        spec = self.spec(name, tensor)
        size, offset = self._place(spec)
        there = (0,) * tensor.ndim
        if tree.is_shard(tensor):
            there = self._place(self.of_layers.spec(name, tensor))[1]
        part = tree.local(tensor).detach()
        for dim, (begin, length) in enumerate(zip(offset, size, strict=True)):
            part = part.narrow(dim, min(begin - there[dim], part.shape[dim]), length)
        made = tree.pad_part(part.to(self.device), self.room(name, tensor.shape))
        return self.held(name, made, tensor)

    def held(self, name: str, part: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a tensor as a state has it."""
        spec = self.spec(name, like)
        return DTensor(part, spec, requires_grad=False)  # pyright: ignore[reportCallIssue]

    def _place(self, spec: DTensorSpec) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shape of this rank's part, and where it begins."""
        return compute_local_shape_and_global_offset(
            spec.shape, self.mesh, spec.placements
        )

    def room(self, name: str, shape: torch.Size) -> int:
        """Return how many elements the largest part has."""
        return largest_part(shape, self.cuts[name], self._axes).numel()


def reshard_tree(
    values: Any, layout: Layout | None, shapes: Mapping[str, torch.Size], world: World
) -> Any:
    """Return a tree that lay in another way as it lies in a layout.

    Gathers what was cut: a collective. From replicas it communicates nothing.
    """
    found: list[tuple[torch.Tensor, str | None]] = []

    def noted(tensor: torch.Tensor, name: str | None) -> None:
        found.append((tensor, name))

    def laid(tensor: torch.Tensor, name: str | None) -> torch.Tensor:
        if layout is None or name is None or tensor.shape != shapes[name]:
            return tensor
        return layout.cut(name, tensor)

    _map_named(values, shapes, noted)
    parts = {str(i): t for i, (t, _) in enumerate(found) if tree.is_shard(t)}
    moved = {str(i): laid(*e) for i, e in enumerate(found) if str(i) not in parts}
    for some in by_calls(parts, world, label="lay out anew"):
        moved |= {i: laid(whole, found[int(i)][1]) for i, whole in some.items()}
    order = map(str, range(len(found)))

    def put(_tensor: torch.Tensor, _name: str | None) -> torch.Tensor:
        return moved[next(order)]

    return _map_named(values, shapes, put)


def _map_named(
    values: Any,
    shapes: Collection[str],
    fn: Callable[[torch.Tensor, str | None], Any],
    name: str | None = None,
) -> Any:
    """Return a tree with what a function of each tensor, and its parameter's name, gives."""
    if isinstance(values, torch.Tensor):
        return fn(values, name)
    if isinstance(values, Mapping):
        items = cast("Mapping[Any, Any]", values).items()
        return {
            k: _map_named(v, shapes, fn, k if k in shapes else name) for k, v in items
        }
    if isinstance(values, (list, tuple)) and not hasattr(values, "_fields"):
        each = [_map_named(v, shapes, fn, name) for v in cast("list[Any]", values)]
        return each if isinstance(values, list) else tuple(each)
    if isinstance(values, Pending):
        return Pending.of(_map_named(values.wait(), shapes, fn, name))
    return values


# Draws for tensors that ranks have parts of: each rank's part of what one would draw.


_DRAWS = torch.Tag.nondeterministic_seeded
"""By which torch knows its random operators."""


class WholeDraws(TorchDispatchMode):
    """Draws the whole where a tensor is split, and keeps this rank's part.

    torch draws the part, from generators that are alike on all ranks, so that the rows of one
    rank would have the noise of another's.

    Cost: while a tensor is drawn, its whole.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call an operator of torch's, and another in the place of one that draws.

        Raises:
            ArgumentError: it draws by the values of a tensor that is split.
        """
        kwargs = kwargs or {}
        if _DRAWS not in func.tags or not any(map(_is_split, args)):
            return func(*args, **kwargs)
        like, *others = args
        name = func._schema.name.removeprefix("aten::")
        fills = name.endswith("_")
        if not (fills or name.endswith("_like")) or any(map(_is_split, others)):
            msg = (
                f"torch's {name} draws by the values of a tensor that is split over the ranks,"
                " and each has a part of them. Draw numbers and compare them, as in"
                " torch.rand_like(tensor) < probability."
            )
            raise ArgumentError(msg)
        part = tree.local(like)
        whole = torch.empty(like.shape, dtype=like.dtype, device=part.device)
        drawn = _part(func(whole, *others, **kwargs), like)
        if fills:
            part.copy_(drawn)
            return like
        return tree.with_local(like, tree.pad_part(drawn, tree.room(part)))


def _is_split(tensor: Any) -> bool:
    """Whether it is a DTensor, and no sum of which each rank has a part."""
    placements = tensor.placements if tree.is_shard(tensor) else ()
    return bool(placements) and not any(each.is_partial() for each in placements)


def _part(whole: torch.Tensor, like: Any) -> torch.Tensor:
    """Return what a rank has of a whole that lies as another tensor does."""
    from torch.distributed.tensor._utils import (  # noqa: PLC0415 - it is loaded by now
        compute_local_shape_and_global_offset,
    )

    size, offset = compute_local_shape_and_global_offset(
        like.shape, like.device_mesh, like.placements
    )
    for dim, (begin, length) in enumerate(zip(offset, size, strict=True)):
        whole = whole.narrow(dim, min(begin, whole.shape[dim]), length)
    return whole
