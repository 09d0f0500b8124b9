# SPDX-License-Identifier: Apache-2.0
"""What a store says when its directory, its newest checkpoint or a thread is missing."""

import shutil
import threading
from functools import partial

import pytest
import torch
from torch import nn

import accelfn as af
from accelfn.errors import CheckpointCorruptError, CheckpointError, CheckpointWriteError
from accelfn.testing import simulate
from tests.internals import files, name_of

STEP = af.make_step(lambda model, batch: model(batch).square().mean())


def fresh(world=None):
    """Return a state before its first update."""
    sgd = partial(torch.optim.SGD, lr=0.1)
    return af.TrainState.create(
        model=lambda: nn.Linear(2, 1), optimizer=sgd, world=world
    )


def stored(folder, updates=2):
    """Save a checkpoint after each of some updates, and return the store."""
    state = fresh()
    store = af.CheckpointStore(folder, keep=None, async_=False)
    for _ in range(updates):
        state, _ = STEP(state, torch.ones(1, 2))
        store.save(state)
    store.close()
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
    with pytest.raises(CheckpointError, match=r"removed while.*restore") as caught:
        af.load(fresh(), store.latest)
    assert not isinstance(caught.value, CheckpointCorruptError)


@pytest.mark.parametrize("size", [1, 2])
def test_restore_takes_the_newest_if_one_is_removed_meanwhile(
    size, tmp_path, monkeypatch
):
    """All ranks begin again with the checkpoint that the run has saved since."""
    store = stored(tmp_path / "runs")
    newest = store.latest
    removing(monkeypatch, lambda: newest.rename(newest.with_name(name_of(3))))
    steps = simulate(
        size, lambda world: store.restore(fresh(world)).params["weight"].tolist()
    )
    monkeypatch.undo()
    assert list(steps) == [store.restore(fresh()).params["weight"].tolist()] * size


def test_a_deleted_directory_is_not_an_empty_one(tmp_path):
    """A store whose directory was deleted raises, and does not begin a run again."""
    store = stored(tmp_path / "runs")
    shutil.rmtree(store.directory)
    for use in (lambda: store.steps, lambda: store.restore(fresh())):
        with pytest.raises(CheckpointError, match="were deleted after"):
            use()


def test_a_newest_checkpoint_that_is_broken(tmp_path):
    """`restore` names the newest whole one, and how to continue from it."""
    store = stored(tmp_path / "runs", updates=3)
    for step in (2, 3):
        path = store.directory / name_of(step) / "rank-00000.safetensors"
        path.write_bytes(path.read_bytes()[:-8])
    words = r"store\.restore\(state, step=1\)"
    with pytest.raises(CheckpointCorruptError, match="bytes, but had") as caught:
        store.restore(fresh())
    assert [words.replace("\\", "") in note for note in caught.value.__notes__] == [
        True
    ]
    (store.directory / name_of(9)).symlink_to(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=rf"broken link to .*nowhere.*{words}"):
        store.restore(fresh())
    assert store.restore(fresh(), step=1).step == 1


@pytest.mark.parametrize("size", [1, 2])
def test_an_asynchronous_save_without_a_thread(size, tmp_path, monkeypatch):
    """All ranks raise accelfn's error, which says what to write, and nothing is left."""
    real = threading.Thread.start

    def start(thread):
        if thread.name == "accelfn-save":
            msg = "can't start new thread"
            raise RuntimeError(msg)
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)

    def save(world):
        store = af.CheckpointStore(tmp_path / "runs")
        store.save(fresh(world))
        with pytest.raises(CheckpointWriteError, match=r"no thread.*async_=False"):
            store.wait()
        store.close()
        return store.steps

    assert list(simulate(size, save)) == [()] * size
