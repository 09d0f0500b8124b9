# SPDX-License-Identifier: Apache-2.0
"""Wait in tests until a condition is true, not for a fixed time."""

import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

HANGS = 300.0
"""After so many seconds a wait counts as a hang; it is longer than any wait on a slow machine."""


def wait_until(holds: Callable[[], bool]) -> None:
    """Return as soon as `holds()` is true."""
    ends_at = time.monotonic() + HANGS
    while not holds():
        assert time.monotonic() < ends_at, "it did not come to hold"
        time.sleep(0.02)


def heard(pipe: Connection) -> Any:
    """Return what another process says next."""
    assert pipe.poll(HANGS), "the other process says nothing"
    return pipe.recv()


def is_gone(pid: int) -> bool:
    """Whether a process has ended with all its threads, though nobody may have noticed."""
    folder = Path("/proc", str(pid))
    try:
        status = (folder / "stat").read_text()
        num_threads = len(list((folder / "task").iterdir()))
    except (FileNotFoundError, ProcessLookupError):
        return True
    return num_threads <= 1 and status.rpartition(")")[2].split()[0] in "ZX"
