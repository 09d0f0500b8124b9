# SPDX-License-Identifier: Apache-2.0
"""A box of a tensor, read from a file that has the whole: the bytes it needs, and no others."""

import itertools
import math
from typing import BinaryIO

import torch

from accelfn.base import large_pages
from accelfn.checkpoint import files
from accelfn.checkpoint.slices import Slice

_FINE = 4096
"""Bytes: what lies between shorter runs is read too, as a disk does anyway."""


def read_box(
    stream: BinaryIO, begin: int, dtype: torch.dtype, box: Slice
) -> torch.Tensor:
    """Return the values of a box in a tensor that lies in a file, the last dim fastest.

    Args:
        stream: of the file, without a buffer.
        begin: the byte at which the tensor begins.
        dtype: of its values.
        box: in the tensor.

    Raises:
        OSError: the file ends before.
    """
    if not box.count:
        return torch.empty(box.size, dtype=dtype)
    strides = [math.prod(box.shape[dim + 1 :]) for dim in range(len(box.shape))]
    starts, length = _runs(box, strides)
    num_bytes = length * dtype.itemsize
    if len(starts) > 1 and num_bytes < _FINE:
        flat = large_pages.empty([starts[-1] + length - starts[0]], dtype)
        stream.seek(begin + starts[0] * dtype.itemsize)
        files.read_into(stream, files.bytes_of(flat))
        return flat.as_strided(box.size, strides).contiguous()
    found = large_pages.empty(box.size, dtype)
    values = files.bytes_of(found)
    for number, start in enumerate(starts):
        stream.seek(begin + start * dtype.itemsize)
        run = values[number * num_bytes : (number + 1) * num_bytes]
        files.read_into(stream, run)
    return found


def _runs(box: Slice, strides: list[int]) -> tuple[list[int], int]:
    """Return where the runs of a box begin, and the length of each, in elements."""
    cut = [dim for dim, size in enumerate(box.size) if size != box.shape[dim]]
    last = max(cut, default=0)  # behind it nothing is cut
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
