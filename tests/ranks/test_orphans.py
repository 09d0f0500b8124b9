# SPDX-License-Identifier: Apache-2.0
"""A launcher that is killed leaves no rank behind, on its machine or in a notebook."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import accelfn
from tests.waiting import HANGS, is_gone, wait_until

SCRIPTS = Path(__file__).parent / "scripts"
PACKAGE = Path(accelfn.__file__).parent
CALLS = """
import os, sys, threading
from pathlib import Path
import accelfn as af

def work(world, folder):
    Path(folder, f"pid-{world.rank}").write_text(str(os.getpid()))
    threading.Event().wait()

def launch():
    af.launch(2, work, sys.argv[1], device="cpu")

thread = threading.Thread(target=launch)
thread.start()
thread.join()
"""

pytestmark = pytest.mark.ranks(2)


def started(
    words: list[object], folder: Path
) -> tuple[subprocess.Popen[bytes], list[int]]:
    """Start a launcher; return it and its two ranks, when both are at work."""
    run = subprocess.Popen(
        [sys.executable, *map(str, words)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,  # this process is no terminal, whose end is a signal too
    )
    files = [folder / f"pid-{rank}" for rank in range(2)]
    try:
        wait_until(lambda: all(f.exists() and f.read_text() for f in files))
    except BaseException:
        run.kill()
        run.wait()
        raise
    return run, [int(file.read_text()) for file in files]


def killed(run: subprocess.Popen[bytes], ranks: list[int]) -> None:
    """Kill a launcher, and see its ranks end."""
    try:
        assert not any(is_gone(pid) for pid in ranks)
        run.kill()
        assert run.wait() == -signal.SIGKILL
        wait_until(lambda: all(is_gone(pid) for pid in ranks))
    finally:
        for pid in ranks:
            if not is_gone(pid):
                os.kill(pid, signal.SIGKILL)


def test_ranks_end_with_a_launcher_that_is_killed(tmp_path):
    """They are asked to end, as the launcher would ask: those that can save have saved."""
    words = ["-m", "accelfn", "launch", "--nproc", 2, SCRIPTS / "outlives.py"]
    killed(*started([*words, tmp_path], tmp_path))
    assert all((tmp_path / f"saved-{rank}").exists() for rank in range(2))


def test_ranks_end_with_the_process_that_called(tmp_path):
    """A function's ranks end with the kernel of the notebook, from whichever thread it was."""
    script = tmp_path / "calls.py"
    script.write_text(CALLS)
    killed(*started([script, tmp_path], tmp_path))


def test_a_rank_whose_launcher_is_gone_does_not_begin(tmp_path):
    """One that is started as its launcher is killed ends before the script's first line."""
    script = tmp_path / "writes.py"
    script.write_text("open('written', 'w')")
    words = [
        sys.executable,
        PACKAGE / "launching" / "worker.py",
        str(os.getpid() + 1),
        script,
    ]
    done = subprocess.run(words, cwd=tmp_path, check=False, timeout=HANGS)
    assert done.returncode == -signal.SIGTERM
    assert not (tmp_path / "written").exists()
