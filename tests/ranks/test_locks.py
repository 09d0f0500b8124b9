# SPDX-License-Identifier: Apache-2.0
"""Real processes that save: a race for a lock, a holder that is killed, a limit of files."""

import os
import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

import accelfn as af
from tests.internals import Lock, RankProcess
from tests.laws.states import is_of, state_of
from tests.processes import limit_files
from tests.waiting import HANGS, heard


def racing(pipe: Connection) -> None:
    """Try to take the lock of each directory that is sent, and let go when told."""
    while True:
        lock = Lock.of(Path(pipe.recv()))
        try:
            lock.take()
        except af.errors.DirectoryInUseError as error:
            pipe.send(str(error))
        else:
            pipe.send("held")
        pipe.recv()
        lock.release()
        pipe.send("released")


@pytest.fixture
def racers() -> Iterator[list[RankProcess]]:
    """Two processes that want the same lock."""
    found = [RankProcess.start(racing, name=f"racer {i}") for i in range(2)]
    yield found
    for each in found:
        each.end()


def test_one_of_two_processes_holds_a_lock(racers, tmp_path):
    """They race 20 rounds, half of them for a dead process's lock: one holds it, each time."""
    for i in range(20):
        if i % 2:
            dead = Lock.of(tmp_path).text.replace('"begun": "', '"begun": "9')
            (tmp_path / ".lock").write_text(dead)
        for each in racers:
            each.pipe.send(str(tmp_path))
        said = [heard(each.pipe) for each in racers]
        assert said.count("held") == 1
        holder = racers[said.index("held")].process.pid
        refusal = next(text for text in said if text != "held")
        assert f"process {holder} on" in refusal
        for each in racers:
            each.pipe.send("let go")
            assert heard(each.pipe) == "released"
        assert list(tmp_path.iterdir()) == []


def test_a_killed_holder_is_taken_over(racers, tmp_path, capfd):
    """While it lives it is named, and after a kill -9 its lock is another's, with a line."""
    holder = racers[0]
    holder.pipe.send(str(tmp_path))
    assert heard(holder.pipe) == "held"
    store = af.CheckpointStore(tmp_path)
    with pytest.raises(
        af.errors.DirectoryInUseError, match=f"process {holder.process.pid} on"
    ):
        store.save(state_of(1))
    os.kill(holder.process.pid, signal.SIGKILL)
    holder.process.join(HANGS)
    store.save(state_of(1))
    store.close()
    assert f"process {holder.process.pid} of this host" in capfd.readouterr().err
    assert is_of(tmp_path / "step-00000001", 1)


@pytest.mark.parametrize("async_", [False, True])
def test_a_file_may_be_too_large(async_, tmp_path):
    """The error says which file, how much was needed, and what is there; the run goes on."""
    large = state_of(2).with_slot("big", torch.zeros(100_000))
    said = (
        "step 2 .*rank 0 could not write its file: .*File too large .needs 400,"
        ".* bytes, .* are free.*rank-00000.safetensors.*The newest checkpoint is .*step-00000001"
    )
    with limit_files(100_000), af.CheckpointStore(tmp_path, async_=async_) as store:
        store.save(state_of(1))
        with pytest.raises(  # noqa: PT012 - either of them raises
            af.errors.CheckpointWriteError, match=said
        ):
            store.save(large)
            store.wait()
        store.save(state_of(3))
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["step-00000001", "step-00000003"]
