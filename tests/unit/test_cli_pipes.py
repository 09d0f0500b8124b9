# SPDX-License-Identifier: Apache-2.0
"""Commands whose reader leaves, as `head -1` does, end like other programs: without a word."""

import os
import subprocess
import sys

import pytest

import accelfn as af
from tests.internals import cli
from tests.states import linear_state
from tests.waiting import HANGS


def into_a_closed_pipe(words, folder, *, unbuffered):
    """Run a command of which nobody reads the output."""
    reads, writes = os.pipe()
    os.close(reads)
    try:
        return subprocess.run(
            [sys.executable, "-m", "accelfn", *words],
            cwd=folder,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
            stdout=writes,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=HANGS,
        )
    finally:
        os.close(writes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with a store of checkpoints."""
    folder = tmp_path_factory.mktemp("here")
    state = linear_state(2)
    with af.CheckpointStore(folder / "store") as store:
        store.save(state)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "unbuffered"),
    [
        (("--help",), ""),
        (("launch", "--show", "--nproc", "1"), ""),
        (("config", "--default"), ""),
        (("config", "--default"), "1"),
        (("env",), ""),
        (("checkpoint", "ls", "store"), ""),
    ],
    ids=" ".join,
)
def test_a_reader_that_leaves_is_no_error(folder, words, unbuffered):
    """There is no traceback, and the exit code is that of SIGPIPE."""
    done = into_a_closed_pipe(words, folder, unbuffered=unbuffered)
    assert (done.returncode, done.stderr) == (141, "")


def test_another_broken_pipe_is_an_error(monkeypatch):
    """One of what a command does, and not of what it prints, is not hidden."""

    def replay(_):
        raise BrokenPipeError("of a step that is run again")

    monkeypatch.setattr(cli, "_replay", replay)
    with pytest.raises(BrokenPipeError, match="of a step"):
        cli.main(["replay", "somewhere"])


@pytest.mark.slow
def test_python_runs_the_package(tmp_path):
    """D: `python -m accelfn` is the command, with its words and its exit codes."""
    command = [sys.executable, "-m", "accelfn"]
    version = subprocess.run(
        [*command, "--version"],
        check=True,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=HANGS,
    )
    assert version.stdout == f"accelfn {af.__version__}\n"
    wrong = subprocess.run(
        [*command, "lunch"],
        check=False,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=HANGS,
    )
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("usage: accelfn ")
