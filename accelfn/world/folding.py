# SPDX-License-Identifier: Apache-2.0
"""The ranks that a model is split over: gradients along "cp" are summed as along "dp_shard"."""

from typing import Any

import attrs

from accelfn.world import axes as arithmetic
from accelfn.world.world import World

_FOLDED = ("dp_shard x cp",)


def folded(world: World) -> World:
    """Return the ranks that a model may be split over, along the axes of splitting.

    Without axes they all share one copy; those along "cp" count to "dp_shard".
    """
    if not world.axes:
        return attrs.evolve(world, axes={"dp_shard": world.loss.size})
    loss = world.loss
    axes = arithmetic.folded(loss.axes)
    if axes == loss.axes:
        return loss
    connection = loss.connection
    inner = arithmetic.long(loss.axes, ("dp_shard", "cp"))
    if _FOLDED not in connection.parts:
        group: Any = connection.group
        connection.add_part(_FOLDED, group, connection.simulated)
        parts = connection.parts
        outer = {n: parts[n] for n in [("dp_replicate",)] if n in parts}
        rest = {("dp_shard",): parts[inner]} if outer else {}
        parts[_FOLDED].parts = outer | rest
    return attrs.evolve(loss, axes=axes, group=connection.parts[_FOLDED])
