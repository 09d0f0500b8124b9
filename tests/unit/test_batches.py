# SPDX-License-Identifier: Apache-2.0
"""`batches`: from any cursor, the very batches that were left."""

from functools import partial

import attrs
import pytest
import torch

import accelfn as af
from tests.states import linear_state

X = torch.arange(22.0).reshape(11, 2)


def make(setup=None, **options):
    """Return a small state over eleven samples."""
    options = {"global_batch_size": 4, "shuffle": True, **options}
    return linear_state(
        2,
        optimizer=partial(torch.optim.SGD, lr=1e-4),
        data=af.Data(X, **options),
        setup=setup,
    )


def shown(batch):
    """Return all that a batch is, to be compared."""
    return (
        batch.start,
        batch.cursor,
        batch.num_samples,
        batch.weights,
        batch.indices.tolist(),
        batch.filler.tolist(),
        [value.tolist() for value in batch.micro_batches],
    )


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
    with pytest.raises(
        af.errors.BatchError, match=r"2 micro-batches.*batch\.micro_batches"
    ):
        _ = batch.value


def test_without_epochs_there_is_no_end():
    """Without until_epoch= they go on for ever, and have no length."""
    loop = af.batches(make())
    with pytest.raises(
        af.errors.ArgumentError, match=r"never end. Pass until_epoch="
    ) as caught:
        len(loop)
    assert isinstance(caught.value, (ValueError, TypeError))
    reader = iter(loop)
    assert [batch.epoch for batch, _ in zip(reader, range(15), strict=False)][
        9:13:3
    ] == [3, 4]


def test_state_without_data():
    """A state without data has no batches; the refusal says where to give it."""
    state = linear_state(2)
    with pytest.raises(
        af.errors.StateError, match=r"data=None.*data=af\.Data"
    ) as caught:
        af.batches(state)
    assert isinstance(caught.value, ValueError)


def test_cursor_beyond_the_data():
    """A cursor that the data has no sample at is refused with both numbers."""
    state = attrs.evolve(make(), cursor=af.typing.Cursor(0, 11))
    with pytest.raises(
        af.errors.BatchError, match=r"sample 11 of epoch 0.*11.*changed"
    ):
        list(af.batches(state, until_epoch=1))


def test_abandoned_loop_starts_no_trouble():
    """Breaking out and iterating again begins at the state's cursor again."""
    loop = af.batches(make(num_workers=1), until_epoch=1)
    first = [shown(next(iter(loop))) for _ in range(2)]
    assert first[0] == first[1]


def test_shown_as_its_place():
    """A batch shows where it stands, not its tensors."""
    *_, last = af.batches(make(), until_epoch=1)
    assert "<Batch of 3 samples, 3 here in 1 micro-batches, epoch 0 from" in repr(last)


def test_seeking_where_nothing_is_used():
    """Samples that are dropped cannot be sought."""
    state = make(remainder="drop")
    with pytest.raises(af.errors.BatchError, match="sample 8 of epoch 0.*have only 8"):
        af.seek(state, 8)


def test_seeking_without_data():
    """A state without data has no place in them."""
    state = linear_state(2)
    with pytest.raises(af.errors.StateError, match="data=None"):
        af.seek(state, 0)


def test_seeking_beyond_the_epoch_is_refused():
    state = linear_state(data=af.Data(torch.arange(6), global_batch_size=4))
    with pytest.raises(af.errors.BatchError, match="have only 6 samples in all"):
        af.seek(state, 6)
    with pytest.raises(af.errors.ArgumentError, match="0 or more"):
        af.seek(state, -1)
