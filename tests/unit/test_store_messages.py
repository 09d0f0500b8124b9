# SPDX-License-Identifier: Apache-2.0
"""What a store says when its directory, a checkpoint, a thread or a rank is missing."""

import shutil
import threading
from contextlib import redirect_stderr
from io import StringIO
from types import SimpleNamespace

import attrs
import pytest

import accelfn as af
from accelfn.errors import (
    CheckpointCorruptError,
    CheckpointWriteError,
    PeerFailedError,
)
from accelfn.testing import simulate
from tests.checkpoints import FILE, refused
from tests.internals import files, name_of
from tests.states import linear_state


def stored(folder, saves=2):
    """Return a store of some checkpoints."""
    with af.CheckpointStore(folder, keep=None, async_=False) as store:
        for step in range(1, saves + 1):
            store.save(attrs.evolve(linear_state(), step=step))
    return store


def removing(monkeypatch, act):
    """Let the first reading of a file of tensors begin with an act."""
    real, acts = files.read_tensors, [act]

    def read(path, *args, **options):
        if acts:
            acts.pop()()
        return real(path, *args, **options)

    monkeypatch.setattr(files, "read_tensors", read)


def test_a_load_says_that_a_checkpoint_was_removed(tmp_path, monkeypatch):
    """A reader of a running store hears that a checkpoint is gone, and not that it is corrupt."""
    store = stored(tmp_path / "runs")
    removing(monkeypatch, lambda: shutil.rmtree(store.latest))
    with refused("removed while.*restore") as caught:
        af.load(linear_state(), store.latest)
    assert not isinstance(caught.value, CheckpointCorruptError)


@pytest.mark.parametrize("size", [1, 2])
def test_restore_takes_the_newest_if_one_is_removed_meanwhile(
    size, tmp_path, monkeypatch
):
    """All ranks begin again with the checkpoint that the run has saved since."""
    store = stored(tmp_path / "runs")
    newest = store.latest
    removing(monkeypatch, lambda: newest.rename(newest.with_name(name_of(3))))
    found = simulate(size, lambda world: store.restore(linear_state(world=world)).step)
    assert list(found) == [2] * size


def test_a_deleted_directory_is_not_an_empty_one(tmp_path):
    """A store whose directory was deleted raises, and does not begin a run again."""
    store = stored(tmp_path / "runs")
    shutil.rmtree(store.directory)
    for use in (lambda: store.steps, lambda: store.restore(linear_state())):
        with refused("were deleted after"):
            use()


def test_a_newest_checkpoint_that_is_broken(tmp_path):
    """`restore` names the newest whole one, and how to continue from it."""
    store = stored(tmp_path / "runs", saves=3)
    for step in (2, 3):
        path = store.directory / name_of(step) / FILE
        path.write_bytes(path.read_bytes()[:-8])
    words = "store.restore(state, step=1)"
    with refused("bytes, but had", CheckpointCorruptError) as caught:
        store.restore(linear_state())
    assert [words in note for note in caught.value.__notes__] == [True]
    (store.directory / name_of(9)).symlink_to(tmp_path / "nowhere")
    with refused("broken link to .*nowhere") as caught:
        store.restore(linear_state())
    assert words in str(caught.value)
    assert store.restore(linear_state(), step=1).step == 1


@pytest.mark.parametrize("size", [1, 2])
def test_an_asynchronous_save_without_a_thread(size, tmp_path, monkeypatch):
    """All ranks raise accelfn's error, which says what to write, and nothing is left."""
    real = threading.Thread.start

    def start(thread):
        if thread.name == "accelfn-save":
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)

    def save(world):
        store = af.CheckpointStore(tmp_path / "runs")
        store.save(linear_state(world=world))
        with refused("no thread.*async_=False", CheckpointWriteError):
            store.wait()
        store.close()
        return store.steps

    assert list(simulate(size, save)) == [()] * size


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
        assert next_save(tmp_path, PeerFailedError(GONE)) == [(0,)] * 2
    assert said.getvalue() == f"accelfn: {GONE}\n" * 2


def test_a_save_that_another_error_has_ended_is_told_with_the_next(tmp_path):
    """On all ranks; the next is made all the same."""
    full = CheckpointWriteError("The disk is full.")
    with refused(r"The disk is full\. .* started nevertheless", CheckpointWriteError):
        next_save(tmp_path, full)
    assert af.CheckpointStore(tmp_path).steps == (0,)
