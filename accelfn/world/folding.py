# SPDX-License-Identifier: Apache-2.0
"""The ranks that a model is split over: gradients along "cp" are summed as along "dp_shard"."""

from typing import Any

import attrs

from accelfn.world import axes as arithmetic
from accelfn.world.connection import Connection
from accelfn.world.world import World

_FOLDED = ("dp_shard x cp",)


def folded(world: World) -> World:
    """Return the ranks that a model may be split over, along the axes of splitting.

    Without axes they all share one copy; those along "cp" count to "dp_shard".
    """
    if not world.axes:
        return attrs.evolve(world, axes={"dp_shard": world.loss.size})
    axes = arithmetic.folded(world.axes)
    if axes == world.axes:
        return world
    connection = world.connection
    if _FOLDED not in connection.parts:
        connection.add_part(_FOLDED, _group(connection), connection.simulated)
        whole = connection.parts[_FOLDED]
        whole.parts = {}
        for names in arithmetic.joined(axes):
            inner = (*names, "cp") if "dp_shard" in names else names
            part = connection.parts[arithmetic.long(world.axes, inner)]
            whole.add_part(names, _group(part), part.simulated)
    return attrs.evolve(world, axes=axes, group=connection.parts[_FOLDED])


def _group(connection: Connection) -> Any:
    return connection.group
