# SPDX-License-Identifier: Apache-2.0
"""accelfn on a fake accelerator, and where Linux's names are missing, as on Windows."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import settings

from tests.internals import devices
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


PARTS = 4
"""Each is of a few minutes: what takes ten hangs."""


@pytest.mark.slow
@pytest.mark.skipif(devices.count() > 0, reason="torch has one accelerator a process")
@pytest.mark.parametrize("part", range(PARTS))
def test_on_a_fake_accelerator(part):
    """`python -m tests.accelerator` passes: programs, waits, draws, checkpoints, precisions."""
    profile = f"--hypothesis-profile={settings.get_current_profile_name()}"
    which = f"--part={part}/{PARTS}"
    command = [sys.executable, "-m", "tests.accelerator", profile, which]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
