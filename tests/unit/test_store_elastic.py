# SPDX-License-Identifier: Apache-2.0
"""What a store does with a save of ranks of which one is gone."""

from contextlib import redirect_stderr
from io import StringIO
from types import SimpleNamespace

import pytest

import accelfn as af
from accelfn.testing import simulate
from tests.states import linear_state

GONE = "It is unknown whether the state of step 0 was saved: rank 1 has ended."


def next_save(folder, error):
    """Save in a world whose ranks met anew, where a save before ended so; return what is there."""

    def fn(world):
        store = af.CheckpointStore(folder, async_=False)
        store._pending.writing = SimpleNamespace(
            hurry=lambda: None,
            join=lambda: error,
            save=SimpleNamespace(final=folder / "step-00000000"),
        )
        try:
            store.save(linear_state(world=world))
        finally:
            store.close()
        return store.steps

    return list(simulate(2, fn, elastic=1))


def test_a_save_that_is_lost_with_a_rank_is_said_and_no_error(tmp_path):
    """Each rank says so on stderr, and the next save is made."""
    with redirect_stderr(StringIO()) as said:
        assert next_save(tmp_path, af.errors.PeerFailedError(GONE)) == [(0,)] * 2
    assert said.getvalue() == f"accelfn: {GONE}\n" * 2


def test_a_save_that_another_error_has_ended_is_told_with_the_next(tmp_path):
    """On all ranks; the next is made all the same."""
    full = af.errors.CheckpointWriteError("The disk is full.")
    with pytest.raises(
        af.errors.CheckpointWriteError,
        match=r"The disk is full\. .* started nevertheless",
    ):
        next_save(tmp_path, full)
    assert af.CheckpointStore(tmp_path).steps == (0,)
