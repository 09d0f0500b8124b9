# SPDX-License-Identifier: Apache-2.0
"""Slices of tensors, and one slice made of others: how sharded tensors change worlds."""

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self, TypeVar

import attrs
import torch

from accelfn.base import devices, tree
from accelfn.errors import CheckpointCorruptError, PlainDataError

T = TypeVar("T")

_MOST_CUT = 8


@attrs.frozen
class Slice:
    """A box in a tensor.

    Attributes:
        shape: of the whole tensor.
        offset: where the box begins, in each dim.
        size: of the box, in each dim.
    """

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Iterable[int]) -> Self:
        """Return the box that is the tensor."""
        shape = tuple(shape)
        return cls(shape, (0,) * len(shape), shape)

    @classmethod
    def even(cls, shape: Iterable[int], dim: int, index: int, count: int) -> Self:
        """Return part `index` of `count` along a dim, as `torch.chunk` cuts, or nothing."""
        whole = cls.whole(shape)
        length = whole.shape[dim]
        step = -(-length // count)
        begin, end = (min(each * step, length) for each in (index, index + 1))
        return cls(
            whole.shape,
            _with(whole.offset, dim, begin),
            _with(whole.size, dim, end - begin),
        )

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the box of a whole tensor, as a view."""
        for dim, (start, length) in enumerate(zip(self.offset, self.size, strict=True)):
            tensor = tensor.narrow(dim, start, length)
        return tensor

    def within(self, other: "Slice") -> "Slice | None":
        """Return the part that this box shares with another, seen from this one's corner."""
        begins = [max(a, b) for a, b in zip(self.offset, other.offset, strict=True)]
        ends = [
            min(a + n, b + m)
            for a, n, b, m in zip(
                self.offset, self.size, other.offset, other.size, strict=True
            )
        ]
        if any(end <= begin for begin, end in zip(begins, ends, strict=True)):
            return None
        return Slice(
            self.size,
            tuple(begin - at for begin, at in zip(begins, self.offset, strict=True)),
            tuple(end - begin for begin, end in zip(begins, ends, strict=True)),
        )

    def inside(self, other: "Slice") -> "Slice":
        """Return this part of another box as a box of the tensor that the other is of."""
        corner = (a + b for a, b in zip(self.offset, other.offset, strict=True))
        return Slice(other.shape, tuple(corner), self.size)

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether it lies in a tensor of this shape."""
        if not len(shape) == len(self.offset) == len(self.size):
            return False
        ends = (at + n for at, n in zip(self.offset, self.size, strict=True))
        return all(end <= n for end, n in zip(ends, shape, strict=True))

    @property
    def count(self) -> int:
        """How many elements it has."""
        return torch.Size(self.size).numel()


def of_copies(
    by_file: Mapping[str, T], copies: Sequence[int]
) -> dict[int, dict[str, T]]:
    """Return by copy of a model what is said of ranks' files; () is one copy.

    Args:
        by_file: what is said, by names that end in ranks' numbers.
        copies: which copy each rank has a part of.
    """
    found: dict[int, dict[str, T]] = {}
    for file, said in by_file.items():
        rank = int(file.partition("-")[2].partition(".")[0])
        found.setdefault(copies[rank] if copies else 0, {})[file] = said
    return found


def cover(boxes: Iterable[Slice], shape: tuple[int, ...]) -> bool:
    """Whether boxes lie in a tensor, do not overlap, and leave nothing open.

    They are told by their corners, with signs as in inclusion and exclusion: only boxes that
    cover every element once have, added up, those of the whole.

    Cost: 2**n corners a box, where n dims are cut; more than 8 are refused.
    """
    boxes = list(boxes)
    if not all(each.fits(shape) for each in boxes):
        return False
    cut = [
        dim
        for dim, length in enumerate(shape)
        if length == 0 or any(each.size[dim] != length for each in boxes)
    ]
    if len(cut) > _MOST_CUT:
        return False
    corners = Counter[tuple[int, ...]]()
    for box, sign in [*((each, 1) for each in boxes), (Slice.whole(shape), -1)]:
        for ends in itertools.product((0, 1), repeat=len(cut)):
            corner = tuple(
                box.offset[dim] + end * box.size[dim]
                for dim, end in zip(cut, ends, strict=True)
            )
            corners[corner] += sign * (-1) ** sum(ends)
    return not any(corners.values())


def assemble(
    target: Slice,
    dtype: torch.dtype,
    parts: Iterable[tuple[Slice, torch.Tensor]],
) -> torch.Tensor:
    """Return a slice of a tensor of which other slices are held.

    Args:
        target: the slice to return.
        dtype: of the tensor.
        parts: slices that do not overlap, and the values of each.

    Law: resharding to any slices and back is nothing, bitwise.

    Raises:
        CheckpointCorruptError: the parts leave some of it open.
    """
    result = devices.empty(target.size, dtype)
    open_ = target.count
    for part, values in parts:
        here, there = target.within(part), part.within(target)
        if here is None or there is None:
            continue
        here.of(result).copy_(there.of(values))
        open_ -= here.count
    if open_:
        msg = f"{open_} of {target.count} elements of a sharded tensor are in no file."
        raise CheckpointCorruptError(msg)
    return result


def slice_of(tensor: torch.Tensor, where: str = "a DTensor") -> Slice | None:
    """Return which slice of a DTensor this rank holds; None for any other tensor.

    Raises:
        PlainDataError: what ranks hold are no slices, but summands or strided parts.
    """
    if not is_sharded(tensor):
        return None
    from torch.distributed.tensor._utils import (  # noqa: PLC0415 - heavy, and rarely needed
        compute_local_shape_and_global_offset,
    )

    sharded: Any = tensor
    for axis, placement in enumerate(sharded.placements):
        if not _is_slice(sharded, axis):
            msg = (
                f"{where} is a DTensor placed as {placement}; only Shard and Replicate are"
                " saved. Give its redistribute()."
            )
            raise PlainDataError(msg)
    shape = tuple(sharded.shape)
    size, offset = compute_local_shape_and_global_offset(
        sharded.shape, sharded.device_mesh, sharded.placements
    )
    if len(offset) != len(shape):  # this rank is not in the mesh
        return Slice(shape, (0,) * len(shape), (0,) * len(shape))
    return Slice(shape, tuple(offset), tuple(size))


def _is_slice(sharded: Any, axis: int) -> bool:
    """Whether what a rank holds by one axis of the mesh is one piece."""
    placement = sharded.placements[axis]
    if type(placement).__name__ != "_StridedShard":
        return type(placement).__name__ in ("Shard", "Replicate")
    # a piece of every part: one piece, where a further axis gives each rank one part
    inner = list(enumerate(sharded.placements))[axis + 1 :]
    parts = [sharded.device_mesh.size(i) for i, p in inner if p.is_shard(placement.dim)]
    return math.prod(parts) == placement.split_factor


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor; they are known by name, for their module is heavy."""
    kind = type(tensor)
    return kind.__name__ == "DTensor" and kind.__module__.startswith(
        "torch.distributed"
    )


def dtensor_like(local: torch.Tensor, sharded: Any) -> torch.Tensor:
    """Return a DTensor that lies as another does, of this rank's slice.

    torch's own `from_local` would bring it to the device of the mesh.
    """
    return tree.with_local(sharded, local.to(tree.local(sharded).device))


def _with(numbers: tuple[int, ...], dim: int, number: int) -> tuple[int, ...]:
    return (*numbers[:dim], number, *numbers[dim + 1 :])
