# SPDX-License-Identifier: Apache-2.0
"""Programs in the parts of a world, and what rows and columns of ranks say must come of them."""

from functools import partial
from typing import Any

import attrs
import torch
from hypothesis import strategies as st
from torch import nn

import accelfn as af
from tests.ranks.programs_of_axes import KINDS, due


@attrs.frozen
class Call:
    """One call: of which kind, by the ranks that "split" or "across" name, and by which of them.

    Attributes:
        kind: what is called.
        way: to take a part.
        size: of parts; None is by machines.
        among: the parts that make it: "all", or those whose first rank is "even" or "odd".
    """

    kind: str
    way: str
    size: int | None
    among: str = "all"

    def part_of(self, world: af.World) -> af.World:
        """Return the part that makes it."""
        given = {"by": "node"} if self.size is None else {"size": self.size}
        return getattr(world, self.way)(**given)


@attrs.frozen
class Program:
    """Calls in parts of a world whose ranks are on these machines."""

    nodes: tuple[int, ...]
    calls: tuple[Call, ...]

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return len(self.nodes)

    def __call__(self, world: af.World) -> list[Any]:
        """Make the calls."""
        world = attrs.evolve(world, node_rank=self.nodes[world.rank])
        parts = [call.part_of(world) for call in self.calls]
        return [
            self._made(i, part, world.rank)
            if self._is_of(self.calls[i], world.rank)
            else []
            for i, part in enumerate(parts)
        ]

    def expected(self, rank: int) -> list[Any]:
        """Return what comes of each call, by rows and columns of all ranks."""
        return [
            (
                peers.index(rank),
                len(peers),
                due(call.kind, [100.0 * i + each for each in peers], rank),
            )
            if self._is_of(call, rank)
            else []
            for i, call in enumerate(self.calls)
            for peers in [self.peers(call, rank)]
        ]

    def peers(self, call: Call, rank: int) -> list[int]:
        """Return the ranks of one part."""
        ranks = range(self.size)
        if call.size is None:
            rows = [[r for r in ranks if self.nodes[r] == n] for n in set(self.nodes)]
        else:
            rows = [[r for r in ranks if r // call.size == n] for n in ranks]
        (row,) = (row for row in rows if rank in row)
        if call.way == "split":
            return row
        return sorted(each[row.index(rank)] for each in rows if each)

    def _is_of(self, call: Call, rank: int) -> bool:
        first = self.peers(call, rank)[0]
        return call.among in ("all", "odd" if first % 2 else "even")

    def _made(self, index: int, part: af.World, rank: int) -> Any:
        value = torch.tensor([100.0 * index + rank])
        call = self.calls[index]
        made = value if part.size == 1 else KINDS[call.kind](value, part)
        return part.rank, part.size, made.tolist()


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
    among = st.sampled_from(["all", "all", "even", "odd"])
    by_size = st.builds(
        Call,
        kinds,
        st.sampled_from(["split", "across"]),
        st.sampled_from(divisors),
        among,
    )
    by_node = st.builds(Call, kinds, ways, st.none(), among)
    return Program(tuple(nodes), tuple(draw(st.lists(by_size | by_node, max_size=6))))


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
