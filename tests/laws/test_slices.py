# SPDX-License-Identifier: Apache-2.0
"""L47: a tensor cut into slices, and these cut otherwise, is the tensor again, bitwise."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import accelfn as af
from tests.internals import Slice, assemble, cover
from tests.slices import even_slice

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
def shapes_and_cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], list[list[Slice]]]:
    """Draw a shape, and ways to hold a tensor of it."""
    shape = draw(SHAPES)
    return shape, [draw(cuts(shape)) for _ in range(3)]


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor whose elements are all different."""
    return torch.arange(torch.Size(shape).numel(), dtype=torch.int32).reshape(shape)


def held(whole: torch.Tensor, boxes: Sequence[Slice]) -> list[torch.Tensor]:
    """Return what each rank holds, as memory of its own."""
    return [box.of(whole).clone() for box in boxes]


def resharded(parts, old, new) -> list[torch.Tensor]:
    """Return the slices that other ranks hold."""
    pairs = list(zip(old, parts, strict=True))
    return [assemble(box, torch.int32, pairs) for box in new]


@given(shapes_and_cuts())
def test_resharding_is_cutting(drawn):
    """L47: from n ranks to m and on, each rank has what a cut of the whole gives it."""
    shape, ways = drawn
    whole = numbered(shape)
    parts, old = held(whole, ways[0]), ways[0]
    for new in [*ways[1:], [Slice.whole(shape)], ways[0]]:
        parts, old = resharded(parts, old, new), new
        expected = held(whole, new)
        assert [each.shape for each in expected] == [each.shape for each in parts]
        assert all(map(torch.equal, expected, parts))


@given(shapes_and_cuts(), st.data())
def test_a_slice_that_is_missing_is_noticed(drawn, data):
    """L47: what no rank holds is refused, and nothing is made up for it."""
    shape, (boxes, *_) = drawn
    gone = data.draw(st.sampled_from(range(len(boxes))))
    parts = [(box, box.of(numbered(shape))) for box in boxes]
    del parts[gone]
    whole = Slice.whole(shape)
    if boxes[gone].count == 0:
        assert torch.equal(numbered(shape), assemble(whole, torch.int32, parts))
        return
    with pytest.raises(
        af.errors.CheckpointError, match=rf"{boxes[gone].count} of the {whole.count}"
    ):
        assemble(whole, torch.int32, parts)


@given(shapes_and_cuts())
def test_cuts_tile(drawn: tuple[tuple[int, ...], list[list[Slice]]]) -> None:
    """L47: slices into which a tensor was cut are taken for the whole of it."""
    shape, ways = drawn
    for boxes in ways:
        assert cover(boxes, shape)
        assert cover([box for box in boxes if box.count], shape)


@given(SHAPES, st.data())
def test_boxes_tile_if_each_element_is_in_one(shape, data):
    """L47: any boxes are the whole if, counted, each element lies in one of them."""
    boxes = data.draw(cuts(shape))
    for _ in range(data.draw(st.integers(0, 2))):
        i = data.draw(st.sampled_from(range(len(boxes))))
        ends = [sorted(data.draw(st.tuples(*[st.integers(0, n)] * 2))) for n in shape]
        beyond = data.draw(st.sampled_from([0, 0, 0, 1]))
        offset = tuple(begin + beyond for begin, _ in ends)
        size = tuple(end - begin for begin, end in ends)
        boxes[i : i + data.draw(st.integers(0, 1))] = [Slice(shape, offset, size)]
    count = torch.zeros(shape, dtype=torch.int32)
    fits = all(
        at + n <= length
        for box in boxes
        for at, n, length in zip(box.offset, box.size, shape, strict=True)
    )
    for box in boxes if fits else ():
        box.of(count).add_(1)
    assert cover(boxes, shape) is (fits and bool((count == 1).all()))


@given(begin=st.integers(0, 4), count=st.integers(1, 4), first=st.integers(0, 8))
def test_what_no_part_has_is_told(begin: int, count: int, first: int) -> None:
    """However much parts have of what is not asked for."""
    target, part = Slice((8,), (begin,), (count,)), Slice((8,), (first,), (8 - first,))
    values = torch.arange(8.0)
    parts = [(part, values[first:])]
    missing = min(max(first - begin, 0), count)
    if missing:
        with pytest.raises(
            af.errors.CheckpointCorruptError, match=f"lack {missing} of the {count} "
        ):
            assemble(target, torch.float32, parts)
    else:
        found = assemble(target, torch.float32, parts)
        assert torch.equal(found, values[begin : begin + count])
