# SPDX-License-Identifier: Apache-2.0
"""Programs along the axes of a world, and what arrays say must come of them."""

import math
from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np
import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch.distributed import _functional_collectives as functional
from torch.distributed.tensor import DTensor, Replicate, Shard

import accelfn as af
from tests.internals import AXES, neighbor_runs


@attrs.frozen
class Call:
    """One call: of which kind, and along which axes.

    Attributes:
        kind: what is called.
        names: of the axes.
        among: the groups that make it: "all", or those whose first rank is "even" or "odd".
    """

    kind: str
    names: tuple[str, ...]
    among: str = "all"

    def is_of(self, peers: list[int]) -> bool:
        """Whether these ranks make it."""
        return self.among in ("all", "odd" if peers[0] % 2 else "even")


@attrs.frozen
class Program:
    """Calls in a world of axes."""

    axes: Mapping[str, int]
    calls: tuple[Call, ...]

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return math.prod(self.axes.values())

    def __call__(self, world: af.World) -> list[Any]:
        """Make the calls."""
        return [
            _made(call, i, world)
            if call.is_of(self.peers(world.rank, call.names))
            else []
            for i, call in enumerate(self.calls)
        ]

    def expected(self, rank: int) -> list[list[float]]:
        """Return what comes of each call, by slicing an array of all ranks."""
        return [
            due(call.kind, [100.0 * i + each for each in peers], rank)
            if call.is_of(peers := self.peers(rank, call.names))
            else []
            for i, call in enumerate(self.calls)
        ]

    def peers(self, rank: int, names: tuple[str, ...]) -> list[int]:
        """Return the ranks that stand where this one stands, but along these axes."""
        box = np.arange(self.size).reshape(tuple(self.axes.values()))
        (cell,) = np.argwhere(box == rank)
        picked = tuple(
            slice(None) if name in names else at
            for name, at in zip(self.axes, cell, strict=True)
        )
        return np.ravel(box[picked]).tolist()


def _made(call: Call, index: int, world: af.World) -> list[float]:
    """Make a call on what tells the rank and the call."""
    part = world.along(*call.names)
    value = torch.tensor([100.0 * index + world.rank])
    made = value if part.size == 1 else KINDS[call.kind](value, part)
    return made.tolist()


def _broadcast(value: torch.Tensor, part: af.World) -> torch.Tensor:
    return af.broadcast(value, part, root=part.size - 1)


def _message(value: torch.Tensor, part: af.World) -> torch.Tensor:
    """Send to the next rank, and receive from the one before."""
    got = torch.empty(1)
    ahead, behind = (part.rank + 1) % part.size, (part.rank - 1) % part.size
    work = dist.isend(value, group=part.group, group_dst=ahead)
    dist.recv(got, group=part.group, group_src=behind)
    assert work is not None
    work.wait()
    return got


def _functional(value: torch.Tensor, part: af.World) -> torch.Tensor:
    """Gather by torch's functional collective, which finds the group by its name."""
    assert part.group is not None
    return functional.all_gather_single(value, 0, part.group).clone()


def _dtensor(value: torch.Tensor, part: af.World) -> torch.Tensor:
    """Return what ranks hold together, of which each gives its rows."""
    mesh = part.mesh
    rows = DTensor.from_local(value, mesh, [Shard(0)] * mesh.ndim)
    return rows.redistribute(mesh, [Replicate()] * mesh.ndim).to_local()


KINDS = {
    "reduce": af.all_reduce,
    "gather": af.all_gather,
    "broadcast": _broadcast,
    "message": _message,
    "functional": _functional,
    "dtensor": _dtensor,
}


def due(kind: str, values: list[float], rank: int) -> list[float]:
    own = values.index(next(v for v in values if v % 100 == rank))
    if kind == "reduce":
        return [sum(values)]
    if kind == "broadcast":
        return values[-1:]
    if kind == "message":
        return [values[own - 1]]
    return values


@st.composite
def programs(draw: st.DrawFn, *, most: int = 8) -> Program:
    """Draw axes of at most so many ranks, and calls along them."""
    axes: dict[str, int] = {}
    for name in AXES:
        if draw(st.booleans()):
            room = most // math.prod(axes.values())
            extents = [each for each in (2, 1, 3, 4) if each <= room]
            axes[name] = draw(st.sampled_from(extents))
    axes = axes or {"tp": draw(st.integers(1, most))}
    names = [*neighbor_runs(axes), tuple(axes), ()]
    along = st.sampled_from(names).flatmap(st.permutations).map(tuple)
    among = st.sampled_from(["all", "all", "even", "odd"])
    calls = st.builds(Call, st.sampled_from(sorted(KINDS)), along, among)
    return Program(axes, tuple(draw(st.lists(calls, max_size=6))))
