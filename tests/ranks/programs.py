# SPDX-License-Identifier: Apache-2.0
"""Programs that the rank processes of the tests run."""

import accelfn as af


def place(world: af.World) -> tuple[int, int]:
    """Return where the rank is."""
    return world.rank, world.size
