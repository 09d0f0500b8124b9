# SPDX-License-Identifier: Apache-2.0
"""Process groups of a world's axes, and torch's record of them, a DeviceMesh."""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from accelfn.world import axes as arithmetic
from accelfn.world.connection import Connection

Groups: TypeAlias = dict[tuple[str, ...], dist.ProcessGroup]


def open_groups(axes: Mapping[str, int], rank: int, timeout: float) -> Groups:
    """Open the groups of all runs of neighbouring axes, and return those of this rank.

    All ranks open all groups, in one order.
    """
    groups: Groups = {}
    for names in arithmetic.joined(axes):
        for ranks in arithmetic.rows(axes, names):
            group: Any = dist.new_group(
                ranks,
                timeout=timedelta(seconds=timeout),
                group_desc=" x ".join(names),
            )
            if rank in ranks:
                groups[names] = group
    return groups


def mesh_of(
    axes: Mapping[str, int], connection: Connection, device: torch.device
) -> DeviceMesh:
    """Return torch's record of the axes, with accelfn's own groups; made once.

    Two meshes of the same ranks with other groups would let ranks wait for one another.
    """
    if connection.mesh is None:
        names = arithmetic.long(axes, tuple(axes))
        joins = [connection.parts.get((name,), connection) for name in names]
        ranks = dist.get_process_group_ranks(connection.group)
        sizes = [axes[name] for name in names]
        connection.mesh = DeviceMesh.from_group(
            [join.group for join in joins if join.group is not None],
            device.type,
            mesh=torch.tensor(ranks).view(sizes),
            mesh_dim_names=names,
        )
    return connection.mesh
