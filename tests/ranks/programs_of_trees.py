# SPDX-License-Identifier: Apache-2.0
"""Programs of accelfn's collectives on trees, as values: run on simulated and on real ranks."""

import math
from collections.abc import Callable
from typing import Any

import attrs
import torch
from hypothesis import strategies as st

import accelfn as af
from tests.internals import tree

FLOATS = ("float64", "float32", "bfloat16", "float16")
INTEGERS = ("int64", "int32", "int16", "int8", "uint8", "uint16", "uint32")
ONLY_MOVED = ("bool", "uint64", "float8_e4m3fn", "complex64")
DTYPES = (*FLOATS, *INTEGERS, *ONLY_MOVED)
OPS = ("sum", "mean", "min", "max", "product")


@attrs.frozen
class TreeCall:
    """One call of a program, the same on all ranks but for their data.

    Attributes:
        kind: which of `KINDS`.
        dtypes: of the two leaves of the tree.
        counts: how many rows ranks have, each in its turn, where they may differ.
        root: the rank that sends, modulo the world's size.
        op: the reduction.
        transposed: whether the first leaf is laid out the other way.
        strided: whether there is a gap after each element of the second.
    """

    kind: str
    dtypes: tuple[str, str] = ("float32", "float32")
    counts: tuple[int, ...] = (2,)
    root: int = 0
    op: str = "sum"
    transposed: bool = False
    strided: bool = False

    def count(self, place: int) -> int:
        return self.counts[place % len(self.counts)]

    def leaf(self, dtype: str, rows: int, seed: int) -> torch.Tensor:
        numbers = torch.arange(2 * rows).reshape(rows, 2)
        return ((numbers * 3 + seed) % 5).to(getattr(torch, dtype))

    def tree(self, seed: int, rows: int) -> dict[str, Any]:
        first = self.leaf(self.dtypes[0], rows, seed)
        if self.transposed:
            first = first.T.contiguous().T
        second = self.leaf(self.dtypes[1], rows, seed + 1)
        if self.strided:
            second = torch.stack([second, second], -1)[:, 1:, 0]
        return {"x": first, "y": [second, (self.leaf(self.dtypes[1], 1, seed)[0, 0],)]}


def alike(world: af.World, call: TreeCall) -> dict[str, Any]:
    return call.tree(world.rank, call.count(0))


def ragged(world: af.World, call: TreeCall) -> dict[str, Any]:
    return call.tree(world.rank, call.count(world.rank))


def for_each(world: af.World, call: TreeCall) -> list[dict[str, Any]]:
    """Return a tree for each rank, of as many rows as that pair of ranks has."""
    size = world.size
    return [
        call.tree(world.rank * size + to, call.count(world.rank + 2 * to))
        for to in range(size)
    ]


def only_at(world: af.World, call: TreeCall, values: Any) -> Any:
    return values if world.rank == call.root % world.size else None


def metrics(world: af.World, call: TreeCall) -> af.Metrics:
    """Return weighted sums of a rank; those of some weigh nothing."""
    total, weight = call.count(world.rank) * (world.rank + 1), call.count(world.rank)
    return af.Metrics({"loss": (total, weight), "hits": (world.rank, 1)})


KINDS: dict[str, Callable[[af.World, TreeCall], Any]] = {
    "gather": lambda w, c: af.all_gather(alike(w, c), w),
    "gather_ragged": lambda w, c: af.all_gather(ragged(w, c), w, ragged=True),
    "pad_across": lambda w, c: af.pad_across(ragged(w, c)["x"], w),
    "broadcast": lambda w, c: af.broadcast(alike(w, c), w, root=c.root % w.size),
    "reduce": lambda w, c: af.all_reduce(alike(w, c), w, c.op),
    "all_to_all": lambda w, c: af.all_to_all(for_each(w, c), w),
    "gather_objects": lambda w, c: af.all_gather_objects([c.kind] * w.rank, w),
    "broadcast_object": lambda w, c: af.broadcast_object(
        only_at(w, c, w.rank), w, root=c.root % w.size
    ),
    "scatter": lambda w, c: af.scatter(
        only_at(w, c, [*range(w.size)]), w, root=c.root % w.size
    ),
    "mean": lambda w, c: metrics(w, c).all_reduce_mean(w),
    "any_rank": lambda w, c: af.any_rank(c.count(w.rank), w),
    "barrier": lambda w, _: af.barrier(w),
}


def run(world: af.World, program: tuple[TreeCall, ...]) -> list[Any]:
    """Return what each call gives; tensors as their bits, which any dtype has."""
    return [tree.tree_map(bits, KINDS[call.kind](world, call)) for call in program]


def bits(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    data = leaf.clone(memory_format=torch.contiguous_format).reshape(-1)
    data = data.view(torch.uint8).tolist()
    return [str(leaf.dtype), list(leaf.shape), data]


def at_limits(world: af.World) -> list[Any]:
    """Return what reductions give of numbers at the ends of their dtypes, and of NaN."""
    inf, nan = math.inf, math.nan
    rows = [[nan, 1.0, inf, -0.0, -nan, 6e4], [1.0, nan, -inf, 0.0, 2.0, 6e4]]
    found: list[Any] = []
    for name in FLOATS:
        mine = torch.tensor(rows[world.rank % 2], dtype=getattr(torch, name))
        found += [af.all_reduce(mine, world, op) for op in ("min", "max")]
        found.append(af.all_reduce(mine[-1:], world, "mean"))
    for name in INTEGERS:
        info = torch.iinfo(getattr(torch, name))
        ends = [[info.max, info.min, info.max], [info.max, info.min, info.min]]
        mine = torch.tensor(ends[world.rank % 2]).to(getattr(torch, name))
        found += [af.all_reduce(mine, world, op) for op in OPS]
    return [bits(each) for each in found]


@st.composite
def tree_calls(draw: st.DrawFn) -> TreeCall:
    """Draw one call; reduced are dtypes of which sums are known to all ranks."""
    kind = draw(st.sampled_from(sorted(KINDS)))
    known = (*FLOATS, *INTEGERS, "bool") if kind == "reduce" else DTYPES
    dtype = st.sampled_from(known)
    return TreeCall(
        kind,
        dtypes=draw(st.tuples(dtype, dtype)),
        counts=tuple(draw(st.lists(st.integers(0, 3), min_size=1, max_size=3))),
        root=draw(st.integers(0, 2)),
        op=draw(st.sampled_from(OPS)),
        transposed=draw(st.booleans()),
        strided=draw(st.booleans()),
    )
