# SPDX-License-Identifier: Apache-2.0
"""Slices of tensors that are split evenly, as shards of ranks are."""

from tests.internals import Slice


def even_slice(shape: tuple[int, ...], dim: int, index: int, count: int) -> Slice:
    """Return chunk `index` of `count` along a dim, as `torch.chunk`; it can be empty."""
    whole, step = Slice.whole(shape), -(-shape[dim] // count)
    begin, end = (min(i * step, shape[dim]) for i in (index, index + 1))
    offset, size = [*whole.offset], [*whole.size]
    offset[dim], size[dim] = begin, end - begin
    return Slice(shape, tuple(offset), tuple(size))
