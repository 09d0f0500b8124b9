# SPDX-License-Identifier: Apache-2.0
"""Commands of other launchers, run, and what the ranks that they started say."""

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.waiting import HANGS

_SCRIPTS = Path(__file__).parent / "scripts"
AGREES = [sys.executable, str(_SCRIPTS / "agrees.py")]
TRAINS = [sys.executable, str(_SCRIPTS / "trains.py")]


def started(
    words: list[str], env: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        words,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(run: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Wait for the end of all its ranks."""
    with run:
        try:
            out, error = run.communicate(timeout=HANGS)
        finally:
            run.terminate()  # and it ends its ranks
    return run.returncode, out, error


def places(out: str) -> list[str]:
    """Return where the ranks of a run said they are, which ended with the same weights."""
    found = re.findall(r"rank (\d of \d, \d of \d on machine \d) has (\w{8})", out)
    assert len({digest for _, digest in found}) == 1, out
    return sorted(place for place, _ in found)
