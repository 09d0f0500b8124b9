# SPDX-License-Identifier: Apache-2.0
"""`af.split_over_ranks`: parts that are the whole."""

import copy
from collections import deque, namedtuple
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import accelfn as af
from accelfn.testing import simulate

KINDS = {
    "list": list,
    "tuple": tuple,
    "string": lambda values: "".join(chr(97 + value) for value in values),
    "tensor": torch.tensor,
    "array": np.array,
}


def parts(values: Any, size: int, *, pad: bool = False) -> list[Any]:
    return list(
        simulate(size, lambda world: af.split_over_ranks(values, world, pad=pad))
    )


@given(
    values=st.lists(st.integers(0, 25), max_size=20),
    kind=st.sampled_from(sorted(KINDS)),
    size=st.integers(1, 8),
)
def test_parts_in_rank_order_are_the_values(values, kind, size):
    """Of the kind of the whole, as long as can be; padded, all are equally long."""
    whole = KINDS[kind](values)
    before, found = copy.deepcopy(whole), parts(whole, size)
    assert list(chain(*found)) == list(whole) == list(before)
    assert {type(part) for part in found} == {type(before)}
    lengths = [len(part) for part in found]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] - lengths[-1] <= 1
    for part, padded in zip(
        found, parts(whole, size, pad=True) if values else [], strict=False
    ):
        assert type(padded) is type(part)
        assert len(padded) == lengths[0]
        assert list(padded[: len(part)]) == list(part)
        assert {*map(str, padded)} <= {*map(str, whole)}


def test_known_parts():
    assert parts(["A", "B", "C"], 2) == [["A", "B"], ["C"]]
    assert parts(("A", "B", "C"), 2, pad=True) == [("A", "B"), ("C", "C")]
    assert parts([1], 3, pad=True) == [[1], [1], [1]]
    assert [len(part) for part in parts(range(17), 2)] == [9, 8]


def test_a_dict_is_split_by_value_and_not_changed():
    """A dict in a dict too, an empty one into empty ones; a tensor's part shares its memory."""
    rows = torch.arange(6).view(3, 2)
    values = {"text": ["a", "b", "c"], "in": {"rows": rows}, "at": range(3)}
    first, second = parts(values, 2)
    assert first["text"] == ["a", "b"]
    assert second["in"]["rows"].tolist() == [[4, 5]]
    assert second["at"] == range(2, 3)
    assert first["in"]["rows"].data_ptr() == rows.data_ptr()
    assert values["text"] == ["a", "b", "c"]
    assert parts({}, 2) == [{}, {}]


Pair = namedtuple("Pair", ["left", "right"])  # noqa: PYI024 - as users have them


@pytest.mark.parametrize("pad", [False, True])
@pytest.mark.parametrize("whole", [b"abc", bytearray(b"abc"), "abc", (1, 2, 3)])
def test_parts_are_of_the_kind_of_the_whole(whole, pad):
    assert {type(each) for each in parts(whole, 2, pad=pad)} == {type(whole)}


def test_padded_ranges_are_lists_on_all_ranks():
    assert parts(range(3), 2, pad=True) == [[0, 1], [2, 2]]
    assert parts(range(4), 2) == [range(2), range(2, 4)]


SEQUENCE = "expected a sequence"
REFUSED = [
    (deque([1, 2]), "can be sliced.*got deque"),
    (Pair([1, 2], [3, 4]), "can be sliced.*got Pair"),
    (3, SEQUENCE),
    (torch.tensor(1), SEQUENCE),
    ({1, 2}, SEQUENCE),
    (None, SEQUENCE),
    ({"a": 3}, f"{SEQUENCE}.*got int"),
    ({"a": [1], "b": 3}, f"{SEQUENCE}.*got int"),
    (iter([1]), f"{SEQUENCE}.*got list_it"),
    ({"a": [1], "b": [1, 2]}, "differ in length: {'a': 1, 'b': 2}"),
]


@pytest.mark.parametrize(("wrong", "words"), REFUSED)
def test_what_has_no_parts_is_refused(wrong, words):
    """What is no sequence, or a dict of others, is refused with its kind."""
    with pytest.raises(af.errors.ArgumentError, match=words):
        af.split_over_ranks(wrong, af.World.single())


def test_nothing_cannot_be_padded():
    with pytest.raises(af.errors.ArgumentError, match="no value can be repeated"):
        parts([], 2, pad=True)


@pytest.mark.parametrize(
    ("axes", "said"),
    [
        ({"dp_replicate": 2, "tp": 2}, r"along tp process .*world\.along\('tp'\)"),
        ({"dp_replicate": 2, "cp": 2}, r"along cp process .*world\.along\('cp'\)"),
        ({"cp": 2, "tp": 2}, r"along cp and tp process .*world\.along\('cp'\)"),
    ],
)
def test_ranks_that_share_samples_split_by_who_has_own(axes, said):
    """A world of them is refused with its axes; ranks of a part of it have parts each."""

    def each_rank(world):
        with pytest.raises(af.errors.ArgumentError, match=said):
            af.split_over_ranks(range(8), world)
        return [*af.split_over_ranks(range(8), world.batch)]

    found = simulate(4, each_rank, axes=axes).results
    size = axes.get("dp_replicate", 1)
    parts = {(*range(k * 8 // size, (k + 1) * 8 // size),) for k in range(size)}
    assert {*map(tuple, found)} == parts
