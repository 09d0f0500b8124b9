# SPDX-License-Identifier: Apache-2.0
"""Ranks that are about to make different calls are told, and none of them makes it."""

import re

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import accelfn as af
from accelfn.errors import CollectiveMismatchError
from accelfn.testing import simulate
from tests.laws.worlds import DDP
from tests.ranks import programs
from tests.ranks.programs_of_checks import CALLS, checked, meet
from tests.strategies import runs

one_call = st.sampled_from(sorted(CALLS))


@st.composite
def calls(draw: st.DrawFn) -> list[str]:
    """Draw a call a rank: one for most of them, and perhaps others for some."""
    size = draw(st.integers(2, 4))
    common = draw(one_call)
    return draw(
        st.lists(st.just(common) | one_call, min_size=size, max_size=size)
        | st.just([common] * size)
    )


@given(names=calls())
def test_different_calls_are_told_on_all_ranks(names):
    """All are told what each was about to do and where, if they differ in anything."""
    told = simulate(len(names), lambda world: meet(world, names)).results
    if len(set(names)) == 1:
        assert set(told) == {""}
        return
    for rank, text in enumerate(told):
        assert text.startswith(f"Rank {rank} of {len(names)}: the ranks' calls do not")
        lines = re.findall(
            r"^  rank (\d): .*programs_of_checks.py:\d+$", text, re.MULTILINE
        )
        assert lines == [str(each) for each in range(len(names))]


@pytest.mark.parametrize(
    ("one", "other", "what"),
    [
        ("reduce 3", "gather 3", "kind, reduction, label"),
        ("reduce 3", "reduce the greatest", "reduction"),
        ("reduce 3", "reduce labelled", "label"),
        ("reduce 3", "reduce 2", "shape or dtype"),
        ("reduce 3", "reduce float64", "shape or dtype"),
        ("reduce a and b", "reduce b and c", "structure"),
        ("gather 2", "gather for gradients", "kind"),
        ("gather for gradients", "gather for its gradients", "need of gradients"),
        ("gather ragged", "gather ragged 3", "shape or dtype"),
        ("broadcast", "broadcast from 1", "root"),
        ("objects", "pickles", "kind"),
        ("mean of a", "mean of b", "structure"),
    ],
)
def test_what_differs_is_named(one, other, what):
    """And nothing else is."""
    for told in simulate(2, lambda world: meet(world, [one, other])):
        assert f"the ranks' calls do not match in {what}. All ranks" in told


@given(run=runs(), size=st.integers(1, 3))
def test_checking_changes_nothing(run, size):
    """A training in a checked world is bitwise that in another, whatever ranks were dealt."""
    split = attrs.evolve(run, setup=DDP)

    def train(world):
        said = af.all_gather_objects("a" * world.rank, world)
        return *programs.train(world, split), said

    plain = simulate(size, train).results
    for (states, means, said), (others, theirs, heard) in zip(
        plain, simulate(size, lambda world: train(checked(world))), strict=True
    ):
        assert (means, said) == (theirs, heard)
        for one, other in zip(states, others, strict=True):
            assert one.keys() == other.keys()
            assert all(torch.equal(one[name], other[name]) for name in one)


@given(names=st.permutations(["a", "b", "c", "d"]))
def test_simulated_worlds_compare_structures(names):
    """Trees whose dicts have other names are refused, though their shapes are alike."""

    def fn(world):
        order = names[:3] if world.rank else ["a", "b", "c"]
        return af.all_reduce(dict.fromkeys(order, torch.ones(2)), world)

    if sorted(names[:3]) == ["a", "b", "c"]:
        simulate(2, fn)
        return
    with pytest.raises(CollectiveMismatchError, match="not match in structure") as told:
        simulate(2, fn)
    assert "{'a': *, 'b': *, 'c': *}" in str(told.value)


@given(rows=st.lists(st.integers(0, 2) | st.none(), min_size=1, max_size=4))
def test_a_lone_number_is_a_row_among_rows(rows):
    """Some ranks may have rows of numbers, where others have one number without a dim."""

    def fn(world):
        count = rows[world.rank]
        mine = torch.full(() if count is None else (count,), float(world.rank))
        return af.all_gather(mine, checked(world), ragged=True).tolist()

    each = [[rank] * (1 if n is None else n) for rank, n in enumerate(rows)]
    joined = [number for row in each for number in row]
    assert [*simulate(len(rows), fn)] == [joined] * len(rows)
