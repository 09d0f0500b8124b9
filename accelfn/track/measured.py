# SPDX-License-Identifier: Apache-2.0
"""What a process can say of itself beside what its step reports."""

import resource
import sys

from accelfn.base import accelerator
from accelfn.base.calling import called
from accelfn.world import World


@called
def peak_memory_bytes(world: World) -> int:
    """Return the most memory this rank has used: of its device's, or the process's own.

    On an accelerator it is what torch has allocated at most, on the CPU the largest resident set.

    Raises:
        WorldError: torch does not count the memory of such a device.

    Example:
        >>> peak_memory_bytes(World.single()) > 1_000_000
        True
    """
    if world.device.type != "cpu":
        return accelerator.peak_memory(world.device)
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else largest * 1024
