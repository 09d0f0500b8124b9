# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint holds, entry by entry, as its manifest says."""

from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias, cast

import attrs
import torch

from accelfn.checkpoint import files
from accelfn.checkpoint.manifest import Manifest

Place: TypeAlias = tuple[Any, ...]
"""Where something stands in a state: unit, then keys and indices."""


@attrs.frozen
class Tensor:
    """A tensor of a checkpoint.

    Attributes:
        name: in the manifest.
        dtype: as torch calls it.
        shape: of the whole.
        size: in bytes, of the whole.
        files: in which it is.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    size: int
    files: tuple[str, ...]

    def __str__(self) -> str:
        """Return dtype and shape."""
        return f"{self.dtype} {self.shape}"


def facts(manifest: Manifest) -> dict[str, Any]:
    """Return what a manifest says beside fields."""
    return {
        "step": manifest.step,
        "ranks": manifest.world_size,
        "optimizer": manifest.optimizer,
        "transforms": list(manifest.transforms),
        "data": manifest.data,
        "metrics": dict(manifest.metrics),
    }


def leaves(manifest: Manifest, rank: int) -> Iterator[tuple[Place, Any]]:
    """Yield all that a rank had but the step; of other ranks than 0, what was their own."""
    if rank >= manifest.world_size:
        return
    differs = manifest.differs if rank else manifest.trees_of(0)
    for unit, tree in manifest.trees_of(rank).items():
        if unit in differs and unit != "step":
            for place, leaf in _of_tree(tree, (unit,)):
                if isinstance(leaf, _Name):
                    yield place, _tensor(manifest, leaf.name, rank)
                else:
                    yield place, leaf


@attrs.frozen
class _Name:
    """A tensor's, in a tree."""

    name: str


def _of_tree(coded: Any, place: Place) -> Iterator[tuple[Place, Any]]:
    if not isinstance(coded, dict):
        yield place, coded
        return
    ((kind, inside),) = cast("dict[str, Any]", coded).items()
    items: Iterable[tuple[Any, Any]] = ()
    match kind:
        case "tensor":
            yield place, _Name(inside)
            return
        case "float":
            yield place, float(inside)
            return
        case "object" | "pending":
            yield from _of_tree(inside, place)
            return
        case "dict":
            items = inside.items()
        case "pairs":
            items = inside
        case _:
            items = enumerate(inside)
    if not inside:
        yield place, {"dict": {}, "pairs": {}, "list": []}.get(kind, ())
    for key, value in items:
        yield from _of_tree(value, (*place, key))


def _tensor(manifest: Manifest, name: str, rank: int) -> Tensor:
    whole = manifest.sharded.get(name)
    if whole is not None:
        dtype, shape, places = (
            whole["dtype"],
            whole["shape"],
            tuple(manifest.slices_of(name, rank)),
        )
    else:
        places = (manifest.file_of(name, rank),)
        entry = manifest.files[places[0]].tensors[name]
        dtype, shape = entry.dtype, entry.shape
    kind, shape = files.DTYPES[dtype], tuple(shape)
    size = torch.Size(shape).numel() * kind.itemsize
    return Tensor(name, str(kind).removeprefix("torch."), shape, size, places)
