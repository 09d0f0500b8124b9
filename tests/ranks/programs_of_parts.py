# SPDX-License-Identifier: Apache-2.0
"""Programs in the parts of a world, and what arrays of ranks say must come of them."""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import attrs
import numpy as np
import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.tensor import DTensor, Replicate, Shard

import accelfn as af
from tests.internals import AXES, neighbor_runs


@attrs.frozen
class Call:
    """One call: of which kind, and by the ranks of which parts.

    Attributes:
        kind: what is called.
        way: how a part is taken: "along" axes, "split" or "across".
        given: the names of axes, or the size of parts; None is by machines.
        among: the parts that make it: "all", or those whose first rank is "even" or "odd".
    """

    kind: str
    way: str
    given: Any
    among: str = "all"

    def part_of(self, world: af.World) -> af.World:
        """Return the part that makes it."""
        if self.way == "along":
            return world.along(*self.given)
        given = {"by": "node"} if self.given is None else {"size": self.given}
        return getattr(world, self.way)(**given)


@attrs.frozen
class Program:
    """Calls in a world whose ranks are on these machines, and of these axes."""

    calls: tuple[Call, ...]
    nodes: tuple[int, ...]
    axes: Mapping[str, int] | None = None

    @classmethod
    def along(cls, axes: Mapping[str, int], calls: tuple[Call, ...]) -> "Program":
        """Return calls along axes, on one machine."""
        return cls(calls, (0,) * math.prod(axes.values()), axes)

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return len(self.nodes)

    def __call__(self, world: af.World) -> list[Any]:
        """Make the calls."""
        world = attrs.evolve(world, node_rank=self.nodes[world.rank])
        parts = [call.part_of(world) for call in self.calls]
        return [
            _made(call.kind, part, 100.0 * i + world.rank)
            if self._is_of(call, world.rank)
            else []
            for i, (call, part) in enumerate(zip(self.calls, parts, strict=True))
        ]

    def expected(self, rank: int) -> list[Any]:
        """Return what comes of each call, by slices of an array of all ranks."""
        return [
            (
                peers.index(rank),
                len(peers),
                _due(call.kind, [100.0 * i + each for each in peers], rank),
            )
            if self._is_of(call, rank)
            else []
            for i, call in enumerate(self.calls)
            for peers in [self.peers(call, rank)]
        ]

    def peers(self, call: Call, rank: int) -> list[int]:
        """Return the ranks of one part."""
        ranks = range(self.size)
        if call.way == "along":
            assert self.axes is not None
            return peers_along(self.axes, call.given, rank)
        if call.given is None:
            rows = [[r for r in ranks if self.nodes[r] == n] for n in set(self.nodes)]
        else:
            rows = [[r for r in ranks if r // call.given == n] for n in ranks]
        (row,) = (row for row in rows if rank in row)
        if call.way == "split":
            return row
        return sorted(each[row.index(rank)] for each in rows if each)

    def _is_of(self, call: Call, rank: int) -> bool:
        first = self.peers(call, rank)[0]
        return call.among in ("all", "odd" if first % 2 else "even")


def peers_along(axes: Mapping[str, int], names: Any, rank: int) -> list[int]:
    """Return the ranks that stand where a rank stands, but along these axes."""
    box = np.arange(math.prod(axes.values())).reshape(tuple(axes.values()))
    (cell,) = np.argwhere(box == rank)
    picked = tuple(
        slice(None) if name in names else at
        for name, at in zip(axes, cell, strict=True)
    )
    return np.ravel(box[picked]).tolist()


def _made(kind: str, part: af.World, number: float) -> Any:
    """Make a call on what tells the rank and the call."""
    value = torch.tensor([number])
    made = value if part.size == 1 else KINDS[kind](value, part)
    return part.rank, part.size, made.tolist()


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


def _due(kind: str, values: list[float], rank: int) -> list[float]:
    own = values.index(next(v for v in values if v % 100 == rank))
    if kind == "reduce":
        return [sum(values)]
    if kind == "broadcast":
        return values[-1:]
    if kind == "message":
        return [values[own - 1]]
    return values


@st.composite
def programs_along_axes(draw: st.DrawFn, *, most: int = 8) -> Program:
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
    kinds = st.sampled_from(sorted(KINDS))
    calls = st.builds(Call, kinds, st.just("along"), along, AMONG)
    return Program.along(axes, tuple(draw(st.lists(calls, max_size=6))))


AMONG = st.sampled_from(["all", "all", "even", "odd"])


@st.composite
def programs(
    draw: st.DrawFn, *, sizes: tuple[int, ...] = (1, 2, 3, 4, 6, 8)
) -> Program:
    """Draw machines, which may be of one size and stand in any order, and calls in parts."""
    size = draw(st.sampled_from(sizes))
    divisors = [n for n in range(1, size + 1) if size % n == 0]
    if draw(st.booleans()):
        each = draw(st.sampled_from(divisors))
        nodes = draw(st.permutations([rank // each for rank in range(size)]))
        ways = st.sampled_from(["split", "across"])
    else:
        nodes = draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))
        ways = st.just("split")
    kinds = st.sampled_from(sorted(KINDS.keys() - {"dtensor"}))
    either = st.sampled_from(["split", "across"])
    by_size = st.builds(Call, kinds, either, st.sampled_from(divisors), AMONG)
    by_node = st.builds(Call, kinds, ways, st.none(), AMONG)
    calls = draw(st.lists(by_size | by_node, max_size=6))
    return Program(tuple(calls), tuple(nodes))


def loss_fn(net: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    x, y = batch
    return (net(x) - y).square().mean()


def trained(size: int, first: int, every: object, world: af.World) -> Any:
    """Train in the part of so many ranks; each part by a seed of its own, from `first` on."""
    part = world if world.size == size else world.split(size=size)
    seed = first + world.rank // size
    generator = torch.Generator().manual_seed(seed)
    draw = partial(torch.randn, generator=generator, dtype=torch.float64)
    state = af.TrainState.create(
        model=lambda: nn.Sequential(
            nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2)
        ).to(torch.float64),
        optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.5),
        data=af.Data((draw(11, 3), draw(11, 2)), global_batch_size=4, shuffle=True),
        setup=af.chain(af.shard_data(), every),
        world=part,
        seed=seed,
    )
    step = af.make_step(loss_fn)
    seen: list[Any] = []
    for batch in af.batches(state, until_epoch=1):
        state, metrics = step(state, batch)
        seen.append(metrics.all_reduce_mean(part))
    state = af.finalize(state)
    mean = af.evaluate(
        state, af.Data((draw(5, 3), draw(5, 2)), global_batch_size=2), loss_fn
    )
    return seen, mean, dict(state.params), dict(state.opt_state)


def seconds(world: af.World) -> set[float]:
    """Return after how long collectives fail, of a world and of parts of it."""
    part = world.split(size=2)
    groups = [each.group for each in (world, part, world.across(size=2))]
    backends = [each._get_backend(torch.device("cpu")) for each in groups]
    return {each.options._timeout.total_seconds() for each in backends}
