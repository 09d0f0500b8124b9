# SPDX-License-Identifier: Apache-2.0
"""What torch.distributed knows in a simulated rank, in place of what the process knows.

torch keeps process groups in one object a process, and swaps it whole for whoever asks; so
nothing of a simulated world is registered with the process. In a rank torch has the group
of the world, by which it translates ranks, and a default group that tells the rank and
refuses to communicate: without one, code that asks `is_initialized()` would take itself
for alone.
"""

from collections.abc import Sequence
from typing import Any, NoReturn, cast

import attrs
import torch
import torch.distributed as dist

from accelfn.errors import DefaultGroupError
from accelfn.testing.simulation import dtensors
from accelfn.testing.simulation.calls import Call
from accelfn.testing.simulation.group import SimulatedGroup


@attrs.define
class Registry:
    """What torch 2.13 calls its `_World`: groups and what it keeps of each."""

    default_pg: dist.ProcessGroup | None
    pg_map: dict[dist.ProcessGroup, Any]
    pg_names: dict[dist.ProcessGroup, str]
    pg_group_ranks: dict[dist.ProcessGroup, dict[int, int]]
    pg_backend_config: dict[dist.ProcessGroup, str]
    tags_to_pg: dict[str, list[dist.ProcessGroup]]
    pg_to_tag: dict[dist.ProcessGroup, str] = attrs.field(factory=dict)
    pg_coalesce_state: dict[dist.ProcessGroup, list[Any]] = attrs.field(factory=dict)
    comms: list[Any] = attrs.field(factory=list)
    pg_config_info: list[dict[str, Any]] = attrs.field(factory=list)
    group_count: int = 0
    numbers: dict[int, int] = attrs.field(factory=dict[int, int])

    @classmethod
    def of(cls, group: SimulatedGroup) -> "Registry":
        """Return what torch is to know in a rank that has this group."""
        registry = cls(
            default_pg=None,
            pg_map={},
            pg_names={},
            pg_group_ranks={},
            tags_to_pg={},
            pg_backend_config={},
        )
        registry.begin(group)
        return registry

    def begin(self, group: SimulatedGroup) -> None:
        """Let this be the group of the world, whose ranks are numbered by their places."""
        self.numbers = {rank: place for place, rank in enumerate(group.members.ranks)}
        default = SimulatedGroup(group.rank_of_run, group.members, _refuse)
        self.default_pg, self.tags_to_pg = default, {"": [group, default]}
        self.add(group)
        self.add(default)

    def add(self, group: SimulatedGroup) -> None:
        """Let torch know a group of the world's ranks."""
        ranks = group.members.ranks
        self.pg_map[group] = ("simulated", None)
        self.pg_names[group] = f"simulated {group.members}".strip()
        self.pg_group_ranks[group] = {
            self.numbers.get(rank, rank): place for place, rank in enumerate(ranks)
        }
        self.pg_backend_config[group] = "cpu:simulated"

    def remove(self, group: SimulatedGroup) -> None:
        """Let torch forget a group."""
        group.forget()
        for each in (self.pg_map, self.pg_names, self.pg_group_ranks):
            each.pop(group, None)
        self.pg_backend_config.pop(group, None)

    def close(self) -> None:
        """Let the process forget what it knows by name."""
        forgotten = [cast("SimulatedGroup", group).forget() for group in self.pg_map]
        if any(forgotten):
            dtensors.forget()


def _refuse(calls: Sequence[Call], returned: Sequence[torch.Tensor]) -> NoReturn:
    del returned
    call = calls[0]
    msg = (
        f"Rank {call.rank} of a simulated world called {call.kind} on torch's default"
        " process group, and there is none: pass group=world.group;"
        " process_group=world.group to DistributedDataParallel, mesh=world.mesh to what takes"
        " a mesh."
    )
    raise DefaultGroupError(msg)
