# SPDX-License-Identifier: Apache-2.0
"""A run is resumed by processes that know nothing of it but what is on the disk."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import run_ranks
from tests.ranks.programs_of_resumes import cut_and_whole
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


@pytest.mark.ranks(4)
@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bucket_cap_mb": 0.001},
        {"find_unused_parameters": True},
        {"static_graph": True},
        {"gradient_as_bucket_view": True},
    ],
)
def test_ranks_add_up_alike_after_a_cut(options, size, tmp_path):
    """A backend's sums depend on where a gradient lies: from the first step, it lies there."""
    for runs in run_ranks(size, cut_and_whole, str(tmp_path), options):
        assert runs == [runs[0]] * len(runs)
