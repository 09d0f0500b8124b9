# SPDX-License-Identifier: Apache-2.0
"""accelfn works where names of Linux are missing, as on macOS and Windows."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.other_systems import MISSING

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("system", MISSING)
def test_training_saving_and_simulated_ranks(system):
    """All uses work in a process that lacks the system's missing names."""
    command = [sys.executable, "-m", "tests.other_systems", system]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    uses = ["train", "save", "run", "simulate", "export", "reject launch"]
    assert done.stdout.splitlines() == uses
