# SPDX-License-Identifier: Apache-2.0
"""Loops over batches: `batches` and `seek` from any cursor, `join_uneven` until ranks run out."""

from itertools import islice

import attrs
import pytest
import torch

import accelfn as af
from accelfn.testing import simulate
from tests.states import linear_state

X = torch.arange(22.0).reshape(11, 2)


def make(setup=None, **options):
    """Return a small state over eleven samples."""
    options = {"global_batch_size": 4, "shuffle": True, **options}
    return linear_state(2, data=af.Data(X, **options), setup=setup)


STEP = af.make_step(lambda model, batch: model(batch).square().mean())


def test_state_follows_the_batches():
    """A step takes the batch's cursor; a new loop goes on from there."""
    state = make()
    for i, batch in enumerate(af.batches(state, until_epoch=2)):
        state, _ = STEP(state, batch)
        assert batch.cursor == state.cursor
        if i == 3:
            break
    rest = [b.start for b in af.batches(state, until_epoch=2)]
    assert [af.typing.Cursor(1, 4), af.typing.Cursor(1, 8)] == rest


def test_batches_outlive_their_state():
    """They read the state once, so it may be donated while they are used."""
    state = make()
    loop = af.batches(state, until_epoch=1)
    assert len(loop) == 3
    for batch in loop:
        state, _ = STEP(state, batch)
    assert len(list(loop)) == 3


def test_plain_values_leave_the_cursor():
    """A step over a plain value does not move the data's cursor."""
    state, _ = STEP(make(), X)
    assert (1, af.typing.Cursor(0, 0)) == (state.step, state.cursor)


def test_value_of_several_is_refused():
    """`value` of a batch of micro-batches says what to read."""
    batch = next(iter(af.batches(make(af.accumulate(num_micro_batches=2)))))
    words = r"2 micro-batches.*batch\.micro_batches"
    with pytest.raises(af.errors.BatchError, match=words):
        _ = batch.value


def test_without_epochs_there_is_no_end():
    """Without until_epoch= they go on for ever, and have no length."""
    loop = af.batches(make())
    words = r"never end. Pass until_epoch="
    with pytest.raises(af.errors.ArgumentError, match=words) as caught:
        len(loop)
    assert isinstance(caught.value, (ValueError, TypeError))
    assert [batch.epoch for batch in islice(loop, 13)][9::3] == [3, 4]


NOT_THERE = [
    (lambda: af.batches(linear_state(2)), "StateError", r"data=None.*data=af\.Data"),
    (lambda: af.seek(linear_state(2), 0), "StateError", "data=None"),
    (
        lambda: next(
            iter(af.batches(attrs.evolve(make(), cursor=af.typing.Cursor(0, 11))))
        ),
        "BatchError",
        r"sample 11 of epoch 0.*11.*changed",
    ),
    (
        lambda: af.seek(make(remainder="drop"), 8),
        "BatchError",
        "sample 8 of epoch 0.*have only 8",
    ),
    (lambda: af.seek(make(), 11), "BatchError", "have only 11 samples in all"),
    (lambda: af.seek(make(), -1), "ArgumentError", "0 or more"),
]


@pytest.mark.parametrize(("call", "kind", "words"), NOT_THERE)
def test_places_that_are_not_there(call, kind, words):
    """Without data, and beyond those that are used, there is no place to read from."""
    with pytest.raises(getattr(af.errors, kind), match=words) as caught:
        call()
    assert isinstance(caught.value, ValueError)


def test_abandoned_loop_starts_no_trouble():
    """Breaking out and iterating again begins at the state's cursor again."""
    loop = af.batches(make(num_workers=1), until_epoch=1)
    one, two = (next(iter(loop)) for _ in range(2))
    assert one.indices.tolist() == two.indices.tolist()
    assert (one.start, one.value.tolist()) == (two.start, two.value.tolist())


def test_shown_as_its_place():
    """A batch shows where it stands, not its tensors."""
    *_, last = af.batches(make(), until_epoch=1)
    assert "<Batch of 3 samples, 3 here in 1 micro-batches, epoch 0 from" in repr(last)


# Until ranks run out.


def joined(lengths, **options):
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


def test_with_together_the_rank_that_ran_out_is_named():
    """Of unequal lengths rank and batch are named, with the others'."""
    words = "rank 1 has 1 batches, but other ranks have 2 or more"
    with pytest.raises(af.errors.DataError, match=words):
        joined([3, 1, 2], ends="together")


def test_a_list_is_micro_batches():
    """A rank's list is its micro-batches, whose weights are all 0 once it has ended."""
    with pytest.raises(af.errors.BatchError, match=r"batch 1 .* empty list"):
        list(af.join_uneven([[1], []], af.World.single()))
    (batch,) = af.join_uneven([[1, 2]], af.World.single())
    assert (batch.micro_batches, batch.weights) == ((1, 2), (None, None))

    def program(world):
        return [b.weights for b in af.join_uneven([[1, 2]] * (1 + world.rank), world)]

    first, second = simulate(2, program)
    assert first == [(None, None), (0, 0)]
    assert second == [(None, None), (None, None)]


def test_nothing_at_all_ends_at_once():
    """Where no rank has a batch, there is none."""
    assert joined([0, 0]) == ([], [])


ENDS = r"ends=.*'last', 'first', 'together'"


@pytest.mark.parametrize(
    ("given", "ends", "words"),
    [
        *(([1], ends, ENDS) for ends in ("never", None, 0)),
        (None, "last", r"join_uneven\(NoneType\).*an iterable"),
        (3, "last", r"join_uneven\(int\).*an iterable"),
    ],
)
def test_what_cannot_be_joined(given, ends, words):
    """What is no iterable, and an unknown end, are refused before anything is read."""
    with pytest.raises(af.errors.ArgumentError, match=words):
        af.join_uneven(given, af.World.single(), ends=ends)


def test_an_iterable_that_raises():
    """A rank's own error is raised there as it is."""

    def broken():
        yield 1
        raise KeyError("planted")

    with pytest.raises(KeyError, match="planted"):
        list(af.join_uneven(broken(), af.World.single()))
