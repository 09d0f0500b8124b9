# SPDX-License-Identifier: Apache-2.0
"""Gradients cross the ranks in one order, in whichever they come to each of them."""

from itertools import takewhile
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

import accelfn as af
from accelfn.testing import simulate
from tests.internals import ReduceOrder


@st.composite
def passes(draw: st.DrawFn) -> tuple[int, bool, list[list[list[int]]]]:
    """Draw what comes to each rank in some passes, each once, and some to a few ranks alone."""
    count, ranks = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    comes = st.permutations(range(count)).flatmap(
        lambda order: st.integers(0, count).map(lambda end: order[:end])
    )
    drawn = [
        [draw(comes) for _ in range(ranks)] for _ in range(draw(st.integers(1, 3)))
    ]
    return count, draw(st.booleans()), drawn


@given(case=passes())
def test_gradients_cross_in_one_order(case: Any) -> None:
    """Each once, as soon as those before it have come, or at the end; learnt, it is rank 0's."""
    count, is_given, drawn = case
    first = drawn[0][0]
    untold = [i for i in range(count) if i not in first]
    want = [*range(count)][::-1] if is_given else [*first, *untold]

    def fn(world: af.World) -> list[list[int]]:
        turns, found = (
            ReduceOrder(count, world, want if is_given else None),
            list[list[int]](),
        )
        for comes in drawn:
            taken, there = list[int](), set[int]()
            for number in comes[world.rank]:
                there.add(number)
                taken += turns.come(number)
                assert [*takewhile(there.__contains__, want)] == taken
            found.append([*taken, *turns.rest()])
        return found

    for each in simulate(len(drawn[0]), fn):
        assert each == [want] * len(drawn)


def test_what_comes_twice_is_not_held_back():
    """DeepSpeed refuses a second gradient of a parameter, which would be lost if it waited."""
    turns = ReduceOrder(2, af.World.single(device="cpu"), [0, 1])
    assert [[*turns.come(0)], [*turns.come(0)], [*turns.rest()]] == [[0], [0], [1]]


@given(data=st.data(), order=st.permutations(range(4)))
def test_a_pass_that_was_broken_off_leaves_nothing(data, order):
    """Whatever had come of it, and was sent or waits: the next one begins anew."""
    turns = ReduceOrder(len(order), af.World.single(device="cpu"), order)
    begun = st.lists(st.sampled_from(order), unique=True)
    for number in data.draw(begun):
        assert {*turns.come(number)} <= {*order}
    turns.begin()
    taken, there = list[int](), set[int]()
    for number in data.draw(st.permutations(order)):
        there.add(number)
        taken += turns.come(number)
        assert [*takewhile(there.__contains__, order)] == taken
