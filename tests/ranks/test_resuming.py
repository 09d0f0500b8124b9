# SPDX-License-Identifier: Apache-2.0
"""A run is resumed by processes that know nothing of it but what is on the disk."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import HANGS

SCRIPT = Path(__file__).parent / "scripts" / "saves.py"


@pytest.mark.ranks(2)
def test_fresh_processes_go_on_bitwise(tmp_path):
    """Saved after every update, in local SGD's period or not, a run ends as it would have.

    With dropout, batch statistics, AdamW, a schedule, an average of parameters, fp16 and
    its scale, and updates that are skipped, on two ranks; each of them ends with the state
    of the uninterrupted run's, bit by bit.
    """
    for what in ("save", "resume"):
        words = ["launch", "--nproc", "2", str(SCRIPT), str(tmp_path), what]
        subprocess.run(
            [sys.executable, "-m", "accelfn", *words],
            check=True,
            capture_output=True,
            timeout=HANGS,
        )
    for rank in (0, 1):
        (whole,) = json.loads((tmp_path / f"save-{rank}").read_text())
        resumed = json.loads((tmp_path / f"resume-{rank}").read_text())
        assert resumed == [whole] * 7
    saved = [json.loads((tmp_path / f"save-{rank}").read_text()) for rank in (0, 1)]
    assert saved[0] != saved[1]  # in the middle of a period ranks differ
