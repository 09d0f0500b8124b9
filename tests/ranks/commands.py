# SPDX-License-Identifier: Apache-2.0
"""Commands that start ranks, and how they end."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.waiting import HANGS

SCRIPTS = Path(__file__).parent / "scripts"
AGREES = [sys.executable, str(SCRIPTS / "agrees.py")]
TRAINS = [sys.executable, str(SCRIPTS / "trains.py")]
ONE_MACHINE = [f"{rank} of 2, {rank} of 2 on machine 0" for rank in range(2)]
"""`places` of two ranks."""
LAUNCH = [sys.executable, "-m", "accelfn", "launch"]


def started(
    *words: object, cwd: Path | None = None, **env: object
) -> subprocess.Popen[str]:
    """Start a command, in a session of its own: this process is not its terminal."""
    own = {name: str(value) for name, value in env.items()}
    return subprocess.Popen(
        [*map(str, words)],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", **own},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def launched(*words: object, **env: object) -> subprocess.Popen[str]:
    return started(*LAUNCH, *words, **env)


def ended(*runs: subprocess.Popen[str]) -> list[tuple[int, str, str]]:
    """Wait for the ends, and see to them: return each exit code, and what was said."""
    try:
        said = [run.communicate(timeout=HANGS) for run in runs]
    finally:
        for run in runs:
            run.terminate()  # a launcher ends its ranks
            run.communicate()
    return [(r.returncode, out, err) for r, (out, err) in zip(runs, said, strict=True)]


def run(*words: object, **options: Any) -> tuple[int, str, str]:
    """Run a command; return its exit code, and what was said."""
    (found,) = ended(started(*words, **options))
    return found


def places(out: str) -> list[str]:
    """Return where the ranks of a run said they are, which ended with the same weights."""
    found = re.findall(r"rank (\d of \d, \d of \d on machine \d) has (\w{8})", out)
    assert len({digest for _, digest in found}) == 1, out
    return sorted(place for place, _ in found)
