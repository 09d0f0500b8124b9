# SPDX-License-Identifier: Apache-2.0
"""Boxes in tensors: which lie in one, and which are the whole of it and nothing twice."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.internals import Slice, cover


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Slice:
    """Draw a box that lies in a tensor."""
    ends = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
    return Slice(shape, tuple(a for a, _ in ends), tuple(b - a for a, b in ends))


@given(data=st.data())
def test_boxes_tile_if_each_element_is_in_one(data: st.DataObject) -> None:
    """Counted element by element, of any boxes, none among them, and of lengths of 0 and 1."""
    shape = data.draw(st.lists(st.integers(0, 3), max_size=3).map(tuple))
    drawn = data.draw(st.lists(boxes(shape), max_size=4))
    if data.draw(st.booleans()):
        drawn.append(Slice.whole(shape))
    seen = torch.zeros(shape, dtype=torch.int32)
    for box in drawn:
        box.of(seen).add_(1)
    assert cover(drawn, shape) == bool((seen == 1).all())


@pytest.mark.parametrize("dims", [8, 9])
def test_a_tensor_that_is_cut_along_too_many_dims_is_no_whole(dims):
    """Up to eight are looked at; more would take twice as long each."""
    shape = (2,) * dims
    cut = [
        Slice(shape, at, (1,) * dims) for at in itertools.product((0, 1), repeat=dims)
    ]
    assert cover(cut, shape) == (dims <= 8)
    assert not cover(cut[1:], shape)
    assert cover([Slice.whole(shape)], shape)


@pytest.mark.parametrize(
    ("offset", "size", "fits"),
    [
        ((0, 0), (2, 3), True),
        ((2, 3), (0, 0), True),
        ((1, 2), (1, 1), True),
        ((1, 0), (2, 3), False),
        ((0, 1), (2, 3), False),
        ((0,), (2,), False),
        ((0, 0), (2,), False),
        ((0,), (2, 3), False),
        ((0, 0, 0), (2, 3, 1), False),
    ],
)
def test_a_box_of_other_dims_lies_in_no_tensor(offset, size, fits):
    """It may touch the end, and not go beyond it, in every dim there is and no other."""
    assert Slice((2, 3), offset, size).fits((2, 3)) == fits
