# SPDX-License-Identifier: Apache-2.0
"""Slices of tensors, and resharding, which assembles a slice from other slices."""

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, BinaryIO, Self, TypeVar

import attrs
import torch

from accelfn.base import tree
from accelfn.base.tree import is_shard
from accelfn.checkpoint import files
from accelfn.checkpoint.files import empty
from accelfn.errors import CheckpointCorruptError, PlainDataError

T = TypeVar("T")

_MOST_CUT = 8
"""The largest number of dims that slices may cut; see `cover`."""


@attrs.frozen
class Slice:
    """A rectangular part (a box) of a tensor.

    Attributes:
        shape: the shape of the full tensor.
        offset: the first index of the box in each dim.
        size: the length of the box in each dim.
    """

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Iterable[int]) -> Self:
        """Return the box that is the full tensor."""
        shape = tuple(shape)
        return cls(shape, (0,) * len(shape), shape)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the values of this box from the full tensor, as a view."""
        for dim, (start, length) in enumerate(zip(self.offset, self.size, strict=True)):
            tensor = tensor.narrow(dim, start, length)
        return tensor

    def within(self, other: "Slice") -> "Slice | None":
        """Return the intersection with another box, relative to this box's corner.

        The result is None if the boxes do not overlap.
        """
        rows = zip(self.offset, self.size, strict=True)
        other_rows = zip(other.offset, other.size, strict=True)
        # for each dim, the first and the last index after this box's corner
        spans = [
            (max(b - a, 0), min(n, b + m - a))
            for (a, n), (b, m) in zip(rows, other_rows, strict=True)
        ]
        if any(end <= begin for begin, end in spans):
            return None
        offset = tuple(begin for begin, _ in spans)
        return Slice(self.size, offset, tuple(end - begin for begin, end in spans))

    def inside(self, other: "Slice") -> "Slice":
        """Convert this box from coordinates relative to `other` to those of the full tensor."""
        corner = (a + b for a, b in zip(self.offset, other.offset, strict=True))
        return Slice(other.shape, tuple(corner), self.size)

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Return whether the box is inside of a tensor of this shape."""
        if not len(shape) == len(self.offset) == len(self.size):
            return False
        ends = (at + n for at, n in zip(self.offset, self.size, strict=True))
        return all(end <= n for end, n in zip(ends, shape, strict=True))

    @property
    def count(self) -> int:
        """The number of elements in the box."""
        return torch.Size(self.size).numel()


def of_copies(
    by_file: Mapping[str, T], copies: Sequence[int]
) -> dict[int, dict[str, T]]:
    """Group the values for files of ranks by the copy of the model that each rank has.

    Args:
        by_file: a value for each file. A file's name has its rank, such as `rank-00001`.
        copies: the number of each rank's copy of the model; () if there is only one copy.
    """
    groups: dict[int, dict[str, T]] = {}
    for file, value in by_file.items():
        rank = int(file.partition("-")[2].partition(".")[0])
        groups.setdefault(copies[rank] if copies else 0, {})[file] = value
    return groups


def cover(boxes: Iterable[Slice], shape: tuple[int, ...]) -> bool:
    """Return whether boxes cover each element of a tensor exactly once.

    The function adds up the corners of all boxes, with signs as in inclusion-exclusion. The sum
    equals that of the full tensor only if the boxes cover each element once.

    Cost: 2**n corners for each box, if boxes are smaller than the tensor in n dims. If n is
    more than 8, the function returns False.
    """
    boxes = list(boxes)
    if not all(box.fits(shape) for box in boxes):
        return False
    dims = [
        dim
        for dim, length in enumerate(shape)
        if length == 0 or any(box.size[dim] != length for box in boxes)
    ]
    if len(dims) > _MOST_CUT:
        return False
    corners = Counter[tuple[int, ...]]()
    for box, sign in [*((box, 1) for box in boxes), (Slice.whole(shape), -1)]:
        for ends in itertools.product((0, 1), repeat=len(dims)):
            corner = tuple(
                box.offset[dim] + end * box.size[dim]
                for dim, end in zip(dims, ends, strict=True)
            )
            corners[corner] += sign * (-1) ** sum(ends)
    return not any(corners.values())


def assemble(
    target: Slice, dtype: torch.dtype, parts: Iterable[tuple[Slice, torch.Tensor]]
) -> torch.Tensor:
    """Assemble a slice of a tensor from other slices.

    Args:
        target: the slice to return.
        dtype: the dtype of the tensor.
        parts: the other slices with their values. They must not overlap.

    Law: resharding a tensor to other slices and back does not change a bit.

    Raises:
        CheckpointCorruptError: the other slices do not cover the target.
    """
    result = empty(target.size, dtype)
    open_ = target.count
    for part, values in parts:
        dest, source = target.within(part), part.within(target)
        if dest is None or source is None:
            continue
        dest.of(result).copy_(source.of(values))
        open_ -= dest.count
    if open_:
        msg = (
            f"The checkpoint is damaged: its files lack {open_} of the {target.count} elements of"
            " a shard. Load another checkpoint."
        )
        raise CheckpointCorruptError(msg)
    return result


def slice_of(tensor: torch.Tensor, where: str = "a DTensor") -> Slice | None:
    """Return which slice of a DTensor this rank has; None if the tensor is not a DTensor.

    Raises:
        PlainDataError: ranks do not have slices, because a placement is not Shard or Replicate.
    """
    if not is_shard(tensor):
        return None
    from torch.distributed.tensor._utils import (  # noqa: PLC0415 - heavy, and rarely needed
        compute_local_shape_and_global_offset,
    )

    dtensor: Any = tensor
    for axis, placement in enumerate(dtensor.placements):
        if not _is_slice(dtensor, axis):
            msg = (
                f"{where} is a DTensor with the placement {placement}, but only Shard and"
                " Replicate can be saved. Use its redistribute() to change the placement."
            )
            raise PlainDataError(msg)
    shape = tuple(dtensor.shape)
    size, offset = compute_local_shape_and_global_offset(
        dtensor.shape, dtensor.device_mesh, dtensor.placements
    )
    if len(offset) != len(shape):  # this rank is not in the device mesh
        return Slice(shape, (0,) * len(shape), (0,) * len(shape))
    return Slice(shape, tuple(offset), tuple(size))


def _is_slice(dtensor: Any, axis: int) -> bool:
    """Return whether each rank along an axis of the mesh has one contiguous slice."""
    placement = dtensor.placements[axis]
    if type(placement).__name__ != "_StridedShard":
        return type(placement).__name__ in ("Shard", "Replicate")
    # a strided shard is contiguous if the inner axes split it into exactly its strides
    inner = list(enumerate(dtensor.placements))[axis + 1 :]
    parts = [dtensor.device_mesh.size(i) for i, p in inner if p.is_shard(placement.dim)]
    return math.prod(parts) == placement.split_factor


def dtensor_like(local: torch.Tensor, sharded: Any) -> torch.Tensor:
    """Return a DTensor with this rank's slice, sharded like another DTensor.

    torch's `from_local` is not used, because it would move the slice to the mesh's device.
    """
    return tree.with_local(sharded, local.to(tree.local(sharded).device))


# Read a box of a tensor from a file, without reading the rest of the tensor.


_FINE = 4096
"""If the contiguous runs of a box have fewer bytes, read them together with the gaps between.

A disk reads blocks of about this size in any case.
"""


def read_box(
    stream: BinaryIO, begin: int, dtype: torch.dtype, box: Slice
) -> torch.Tensor:
    """Read a box of a tensor from a file that has the tensor in row-major order.

    Args:
        stream: the open file, unbuffered.
        begin: the offset of the tensor's first byte.
        dtype: the tensor's dtype.
        box: the box to read.

    Raises:
        OSError: the file is too short.
    """
    if not box.count:
        return torch.empty(box.size, dtype=dtype)
    strides = [math.prod(box.shape[dim + 1 :]) for dim in range(len(box.shape))]
    starts, length = _runs(box, strides)
    num_bytes = length * dtype.itemsize
    if len(starts) > 1 and num_bytes < _FINE:
        flat = empty([starts[-1] + length - starts[0]], dtype)
        stream.seek(begin + starts[0] * dtype.itemsize)
        files.read_into(stream, files.bytes_of(flat))
        return flat.as_strided(box.size, strides).contiguous()
    tensor = empty(box.size, dtype)
    values = files.bytes_of(tensor)
    for number, start in enumerate(starts):
        stream.seek(begin + start * dtype.itemsize)
        run = values[number * num_bytes : (number + 1) * num_bytes]
        files.read_into(stream, run)
    return tensor


def _runs(box: Slice, strides: list[int]) -> tuple[list[int], int]:
    """Return the offsets of a box's contiguous runs, and their common length, in elements."""
    dims = [dim for dim, size in enumerate(box.size) if size != box.shape[dim]]
    last = max(dims, default=0)  # the box is full in later dims
    corners = itertools.product(
        *(
            range(at, at + (size if dim < last else 1))
            for dim, (at, size) in enumerate(zip(box.offset, box.size, strict=True))
            if dim <= last
        )
    )
    starts = [
        sum(at * stride for at, stride in zip(corner, strides, strict=False))
        for corner in corners
    ]
    return starts, math.prod(box.size[last:])
