# SPDX-License-Identifier: Apache-2.0
"""How much was read, which is told by the system."""

from pathlib import Path


def bytes_read() -> int:
    """Return how many bytes this thread has read, of all files."""
    said = Path("/proc/thread-self/io").read_text().split()
    return int(said[said.index("rchar:") + 1])
