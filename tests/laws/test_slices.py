# SPDX-License-Identifier: Apache-2.0
"""L47: a tensor cut into slices, and these cut otherwise, is the tensor again, bitwise."""

import itertools
from contextlib import nullcontext

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accelfn.errors import CheckpointCorruptError
from tests.internals import Slice, assemble, cover


def even_slice(shape: tuple[int, ...], dim: int, index: int, count: int) -> Slice:
    """Return chunk `index` of `count` along a dim, as `torch.chunk`; it can be empty."""
    whole, step = Slice.whole(shape), -(-shape[dim] // count)
    begin, end = (min(i * step, shape[dim]) for i in (index, index + 1))
    offset, size = [*whole.offset], [*whole.size]
    offset[dim], size[dim] = begin, end - begin
    return Slice(shape, tuple(offset), tuple(size))


SHAPES = st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple)
"""Lengths of 0 among them, and those smaller than a world."""


@st.composite
def cuts(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Slice]:
    """Draw how ranks hold a tensor: cut along any dims, one after the other, as a mesh does."""
    boxes = [Slice.whole(shape)]
    for dim in draw(st.permutations(range(len(shape))))[: draw(st.integers(1, 3))]:
        world = draw(st.integers(1, 7))
        boxes = [
            Slice(
                shape,
                (*box.offset[:dim], part.offset[dim], *box.offset[dim + 1 :]),
                (*box.size[:dim], part.size[dim], *box.size[dim + 1 :]),
            )
            for box in boxes
            for part in (even_slice(shape, dim, rank, world) for rank in range(world))
        ]
    return boxes


@st.composite
def boxes_in(draw, shape) -> Slice:
    """Draw a box that lies in a tensor."""
    ends = [sorted(draw(st.tuples(*[st.integers(0, n)] * 2))) for n in shape]
    return Slice(shape, tuple(a for a, _ in ends), tuple(b - a for a, b in ends))


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor whose elements are all different."""
    return torch.arange(torch.Size(shape).numel(), dtype=torch.int32).reshape(shape)


@given(SHAPES, st.data())
def test_resharding_is_cutting(shape, data):
    """L47: from n ranks to m and on, each rank has what a cut of the whole gives it."""
    ways = [data.draw(cuts(shape)) for _ in range(3)]
    old, whole = ways[0], numbered(shape)
    parts = [box.of(whole).clone() for box in old]
    for new in [*ways[1:], [Slice.whole(shape)], ways[0]]:
        pairs = list(zip(old, parts, strict=True))
        parts, old = [assemble(box, torch.int32, pairs) for box in new], new
        expected = [box.of(whole) for box in new]
        assert [each.shape for each in expected] == [each.shape for each in parts]
        assert all(map(torch.equal, expected, parts))


@given(SHAPES, st.data())
def test_a_slice_that_is_missing_is_noticed(shape, data):
    """L47: what no rank holds is refused, however much they hold of what is not asked for."""
    boxes, others = data.draw(cuts(shape)), data.draw(cuts(shape))
    target = data.draw(st.sampled_from([Slice.whole(shape), *others]))
    gone = boxes.pop(data.draw(st.sampled_from(range(len(boxes)))))
    seen = torch.zeros(shape, dtype=torch.int32)
    gone.of(seen).fill_(1)
    missing = int(target.of(seen).sum())
    parts = [(box, box.of(numbered(shape))) for box in boxes]
    if missing == 0:
        found = assemble(target, torch.int32, parts)
        assert torch.equal(target.of(numbered(shape)), found)
        return
    words = f"lack {missing} of the {target.count} "
    with pytest.raises(CheckpointCorruptError, match=words):
        assemble(target, torch.int32, parts)


@given(begin=st.integers(0, 4), count=st.integers(1, 4), first=st.integers(0, 8))
def test_what_no_part_has_is_told(begin, count, first):
    """However much parts have of what is not asked for."""
    target, part = Slice((8,), (begin,), (count,)), Slice((8,), (first,), (8 - first,))
    parts = [(part, torch.arange(8.0)[first:])]
    missing = min(max(first - begin, 0), count)
    words = f"lack {missing} of the {count} "
    expected = pytest.raises(CheckpointCorruptError, match=words)
    with expected if missing else nullcontext():
        found = assemble(target, torch.float32, parts)
        assert torch.equal(found, torch.arange(8.0)[begin : begin + count])


@given(SHAPES, st.data())
def test_boxes_tile_if_each_element_is_in_one(shape, data):
    """L47: cuts are the whole, and any boxes are if, counted, each element lies in one of them."""
    boxes = data.draw(cuts(shape))
    assert cover(boxes, shape)
    assert cover([box for box in boxes if box.count], shape)
    for _ in range(data.draw(st.integers(0, 2))):
        i, box = (
            data.draw(st.sampled_from(range(len(boxes)))),
            data.draw(boxes_in(shape)),
        )
        beyond = data.draw(st.sampled_from([0, 0, 0, 1]))
        moved = attrs.evolve(box, offset=tuple(at + beyond for at in box.offset))
        boxes[i : i + data.draw(st.integers(0, 1))] = [moved]
    count = torch.zeros(shape, dtype=torch.int32)
    fits = all(
        at + n <= length
        for box in boxes
        for at, n, length in zip(box.offset, box.size, shape, strict=True)
    )
    for box in boxes if fits else ():
        box.of(count).add_(1)
    assert cover(boxes, shape) is (fits and bool((count == 1).all()))


@pytest.mark.parametrize("dims", [8, 9])
def test_a_tensor_that_is_cut_along_too_many_dims_is_no_whole(dims):
    """Up to eight are looked at; more would take twice as long each."""
    shape, ones = (2,) * dims, (1,) * dims
    cut = [Slice(shape, at, ones) for at in itertools.product((0, 1), repeat=dims)]
    assert cover(cut, shape) == (dims <= 8)
    assert not cover(cut[1:], shape)
    assert cover([Slice.whole(shape)], shape)


def test_a_box_of_other_dims_lies_in_no_tensor():
    """It may touch the end, and not go beyond it, in every dim there is and no other."""
    for offset, size in (((0, 0), (2, 3)), ((2, 3), (0, 0)), ((1, 2), (1, 1))):
        assert Slice((2, 3), offset, size).fits((2, 3))
    for offset, size in (
        *(((1, 0), (2, 3)), ((0, 1), (2, 3)), ((0,), (2,)), ((0, 0), (2,))),
        *(((0,), (2, 3)), ((0, 0, 0), (2, 3, 1))),
    ):
        assert not Slice((2, 3), offset, size).fits((2, 3))
