# SPDX-License-Identifier: Apache-2.0
"""Accelerators: the suite of tests on a fake one, which has processes of its own."""

import subprocess
import sys

import pytest
from hypothesis import settings

from tests.internals import devices

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
