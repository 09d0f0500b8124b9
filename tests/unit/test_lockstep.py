# SPDX-License-Identifier: Apache-2.0
"""`lockstep`: ranks that run out, in each of the three ways; what is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import accelfn as af
from accelfn.testing import simulate

LENGTHS = st.lists(st.integers(0, 5), min_size=1, max_size=4)


def run(lengths, **options):
    """Return what each rank gets of so many batches of its own: (value, weights)."""

    def program(world):
        mine = [10 * world.rank + i for i in range(lengths[world.rank])]
        return [
            (batch.value, batch.weights, batch.filler.tolist())
            for batch in af.join_uneven(mine, world, **options)
        ]

    return simulate(len(lengths), program).results


def test_all_ranks_are_told_of_one_without_any():
    """None goes on to wait for it."""

    def program(world):
        with pytest.raises(af.errors.DataError, match="rank 1 of 3 has no batch"):
            list(af.join_uneven([] if world.rank == 1 else [1, 2], world))

    simulate(3, program)


@given(lengths=LENGTHS)
def test_with_together_the_rank_that_ran_out_is_named(lengths):
    """Equal lengths pass; of unequal ones rank and batch are named, with the others'."""
    if len(set(lengths)) == 1:
        assert {len(got) for got in run(lengths, ends="together")} == {lengths[0]}
        return
    shortest = min(lengths)
    words = (
        f"rank {lengths.index(shortest)} has {shortest} batches, but other ranks have"
        f" {shortest + 1} or more"
    )
    with pytest.raises(af.errors.DataError, match=words):
        run(lengths, ends="together")


def test_a_list_is_micro_batches():
    """A rank's list is its micro-batches, whose weights are all 0 once it has ended."""
    (batch,) = af.join_uneven([[1, 2]], af.World.single())
    assert (batch.micro_batches, batch.weights) == ((1, 2), (None, None))

    def program(world):
        return [b.weights for b in af.join_uneven([[1, 2]] * (1 + world.rank), world)]

    first, second = simulate(2, program)
    assert first == [(None, None), (0, 0)]
    assert second == [(None, None), (None, None)]


def test_a_list_of_no_micro_batches():
    """It is refused as it comes, before a setup that accumulates takes it."""
    with pytest.raises(af.errors.BatchError, match=r"batch 1 .* empty list"):
        list(af.join_uneven([[1], []], af.World.single()))


def test_nothing_at_all_ends_at_once():
    """Where no rank has a batch, there is none."""
    assert run([0, 0]) == ([], [])


@pytest.mark.parametrize("ends", ["never", None, 0])
def test_another_word(ends):
    """An end that is unknown is refused with the three that are, before anything is read."""
    with pytest.raises(
        af.errors.ArgumentError, match=r"ends=.*'last', 'first', 'together'"
    ):
        af.join_uneven([1], af.World.single(), ends=ends)


@pytest.mark.parametrize("given_value", [None, 3])
def test_what_is_no_iterable(given_value):
    """Something else than batches is refused by its kind."""
    kind = type(given_value).__name__
    with pytest.raises(
        af.errors.ArgumentError, match=rf"join_uneven\({kind}\).*an iterable"
    ):
        af.join_uneven(given_value, af.World.single())


def test_an_iterable_that_raises():
    """A rank's own error is raised there as it is."""

    def broken():
        yield 1
        raise KeyError("planted")

    with pytest.raises(KeyError, match="planted"):
        list(af.join_uneven(broken(), af.World.single()))
