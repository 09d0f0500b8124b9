# SPDX-License-Identifier: Apache-2.0
"""`Layout`: along which axes of the world each parameter is cut, and at which dim.

A state's values follow it: parameters, and whatever in the optimizer's state and in slots
stands under a parameter's name and has its shape. They are torch's DTensors, whose shape is
that of the whole.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Self, cast

import attrs
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from accelfn.base import shards
from accelfn.definition.cuts import Cuts, cuts_of, largest_part
from accelfn.world import World
from accelfn.world.folding import folded


@attrs.frozen(eq=False)
class Layout:
    """How a model lies over the ranks.

    Attributes:
        mesh: the axes.
        device: where parts live.
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
        world = folded(world)
        cuts = cuts_of(owners, metas, world.axes)
        if not cuts:
            return None
        shapes = {name: meta.shape for name, meta in metas.items()}
        return cls(world.mesh, world.device, cuts, shapes)

    def same(self, other: "Layout | None") -> bool:
        """Whether another cuts alike."""
        return other is not None and (self.cuts, self.mesh) == (other.cuts, other.mesh)

    def spec(self, name: str, like: torch.Tensor) -> DTensorSpec:
        """Return torch's record of how a parameter, or what has its shape, lies."""
        names = cast("tuple[str, ...]", self.mesh.mesh_dim_names)
        cuts = self.cuts[name]
        placements = tuple(Shard(cuts[n]) if n in cuts else Replicate() for n in names)
        meta = TensorMeta(like.shape, like.stride(), like.dtype)
        return DTensorSpec(self.mesh, placements, tensor_meta=meta)

    def cut(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """Return what this rank holds of a tensor that all have, in memory of its own.

        It has room for as many elements as the largest part, as FSDP gathers them. The whole
        may be on the CPU: the part is on the world's device.
        """
        if name not in self.cuts:
            return whole
        spec = self.spec(name, whole)
        size, offset = compute_local_shape_and_global_offset(
            whole.shape, self.mesh, spec.placements
        )
        part = whole.detach()
        for dim, (begin, length) in enumerate(zip(offset, size, strict=True)):
            part = part.narrow(dim, min(begin, part.shape[dim]), length)
        made = shards.padded(part.to(self.device), self.room(name, whole.shape))
        return DTensor(made, spec, requires_grad=False)  # pyright: ignore[reportCallIssue]

    def room(self, name: str, shape: torch.Size) -> int:
        """Return how many elements the largest part has."""
        names = cast("tuple[str, ...]", self.mesh.mesh_dim_names)
        axes = dict(zip(names, self.mesh.shape, strict=True))
        return largest_part(shape, self.cuts[name], axes).numel()


def laid_out(tree: Any, layout: Layout | None, shapes: Mapping[str, torch.Size]) -> Any:
    """Return a tree that lay in another way as it lies in a layout.

    Gathers what was cut: a collective. From replicas it communicates nothing.
    """

    def moved(value: Any, name: str | None) -> Any:
        if isinstance(value, torch.Tensor):
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            belongs = name is not None and whole.shape == shapes[name]
            return layout.cut(name, whole) if layout and name and belongs else whole
        if isinstance(value, Mapping):
            items = cast("Mapping[Any, Any]", value)
            return {k: moved(v, k if k in shapes else name) for k, v in items.items()}
        if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
            parts = [moved(each, name) for each in cast("list[Any]", value)]
            return parts if isinstance(value, list) else tuple(parts)
        return value

    return moved(tree, None)
