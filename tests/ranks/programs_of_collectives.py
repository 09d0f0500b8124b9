# SPDX-License-Identifier: Apache-2.0
"""Programs of collectives as values: drawn up front, run on simulated and on real ranks."""

from collections.abc import Callable
from typing import Any, TypeAlias

import attrs
import torch
import torch.distributed as dist

import accelfn as af

Posted: TypeAlias = tuple[Any, Any]
"""A work to wait for, or None; and what will hold the results then."""

FLOATS = ("float64", "float32", "bfloat16", "float16")
INTEGERS = ("int64", "int32", "int8", "uint8")
DTYPES = (*FLOATS, *INTEGERS, "bool")  # Gloo gathers no complex numbers
REDUCTIONS = (
    *((name, dtype) for name in ("SUM", "PRODUCT") for dtype in (*FLOATS, *INTEGERS)),
    *((name, dtype) for name in ("MIN", "MAX") for dtype in (*FLOATS, *INTEGERS)),
    *((name, dtype) for name in ("BAND", "BOR", "BXOR") for dtype in INTEGERS),
    *(("AVG", dtype) for dtype in FLOATS),
    *(("SUM", dtype) for dtype in ("bool", "complex64")),
)


@attrs.frozen
class Collective:
    """One call of a program, the same on all ranks but for their data.

    Attributes:
        kind: which function of this module calls it.
        numbers: small integers, which each rank takes in a turn of its own as its data.
        length: how many of them a rank's tensor has.
        reduction: of those that reduce, by name, and the dtype.
        root: the rank that sends or receives, modulo the world's size.
        is_async: whether it is waited for at the end of the program only.
    """

    kind: str
    numbers: tuple[int, ...] = (1,)
    length: int = 1
    reduction: tuple[str, str] = ("SUM", "float64")
    root: int = 0
    is_async: bool = False

    def data(self, world: af.World, *, parts: int = 1) -> torch.Tensor:
        """Return a rank's tensor, of some times the length."""
        turned = [
            self.numbers[(world.rank + i) % len(self.numbers)]
            for i in range(parts * self.length)
        ]
        return torch.tensor(turned).to(getattr(torch, self.reduction[1]))

    def empty(self, world: af.World, *, parts: int = 1) -> torch.Tensor:
        """Return a tensor for results."""
        return torch.zeros_like(self.data(world, parts=parts))

    def empties(self, world: af.World) -> list[torch.Tensor]:
        """Return a tensor a rank for results."""
        return [self.empty(world) for _ in range(world.size)]

    def options(self, world: af.World) -> dict[str, Any]:
        """Return what all calls are given."""
        return {"group": world.group, "async_op": self.is_async}

    @property
    def op(self) -> Any:
        """The reduction that torch knows."""
        return getattr(dist.ReduceOp, self.reduction[0])


def run(world: af.World, program: tuple[Collective, ...]) -> list[Any]:
    """Run a program; return what each call gave, those to be awaited waited for last."""
    posted = [CALLS[each.kind](world, each) for each in program]
    for work, _ in reversed(posted):
        if work is not None:
            work.wait()
    return [results for _, results in posted]


def all_reduce(world: af.World, call: Collective) -> Posted:
    x = call.data(world)
    return dist.all_reduce(x, op=call.op, **call.options(world)), x


def reduce(world: af.World, call: Collective) -> Posted:
    x, root = call.data(world), call.root % world.size
    work = dist.reduce(x, dst=root, op=call.op, **call.options(world))
    return (
        work,
        x if world.rank == root else None,
    )  # the others' is torn by some backends


def broadcast(world: af.World, call: Collective) -> Posted:
    x = call.data(world)
    return dist.broadcast(x, src=call.root % world.size, **call.options(world)), x


def all_gather(world: af.World, call: Collective) -> Posted:
    got = call.empties(world)
    return dist.all_gather(got, call.data(world), **call.options(world)), got


def all_gather_single(world: af.World, call: Collective) -> Posted:
    got = call.empty(world, parts=world.size)
    return dist.all_gather_single(got, call.data(world), **call.options(world)), got


def gather(world: af.World, call: Collective) -> Posted:
    root = call.root % world.size
    got = call.empties(world) if world.rank == root else None
    return dist.gather(call.data(world), got, dst=root, **call.options(world)), got


def scatter(world: af.World, call: Collective) -> Posted:
    root, got = call.root % world.size, call.empty(world)
    whole = call.data(world, parts=world.size)
    parts = list(whole.chunk(world.size)) if world.rank == root else None
    return dist.scatter(got, parts, src=root, **call.options(world)), got


def reduce_scatter(world: af.World, call: Collective) -> Posted:
    got, whole = call.empty(world), call.data(world, parts=world.size)
    parts = list(whole.chunk(world.size))
    return dist.reduce_scatter(got, parts, op=call.op, **call.options(world)), got


def reduce_scatter_single(world: af.World, call: Collective) -> Posted:
    got, whole = call.empty(world), call.data(world, parts=world.size)
    work = dist.reduce_scatter_single(got, whole, op=call.op, **call.options(world))
    return work, got


def all_to_all(world: af.World, call: Collective) -> Posted:
    whole, got = call.data(world, parts=world.size), call.empties(world)
    parts = list(whole.chunk(world.size))
    return dist.all_to_all(got, parts, **call.options(world)), got


def all_to_all_uneven(world: af.World, call: Collective) -> Posted:
    """Give rank r one row more than rank r - 1, so that no two get the same."""
    counts = [call.length + rank for rank in range(world.size)]
    whole = call.data(world, parts=world.size + sum(counts))[: sum(counts)]
    mine = counts[world.rank]
    got = torch.zeros(mine * world.size, dtype=whole.dtype)
    work = dist.all_to_all_single(
        got, whole, [mine] * world.size, counts, **call.options(world)
    )
    return work, got


def barrier(world: af.World, call: Collective) -> Posted:
    return dist.barrier(**call.options(world)), None


def send_recv(world: af.World, call: Collective) -> Posted:
    """Send from the root to the next rank."""
    source, x = call.root % world.size, call.data(world)
    if world.rank == source:
        dist.send(x, dst=(source + 1) % world.size, group=world.group, tag=call.length)
    elif world.rank == (source + 1) % world.size:
        dist.recv(x, src=source, group=world.group, tag=call.length)
    return None, x


def recv_from_any(world: af.World, call: Collective) -> Posted:
    """Send from the root to the next rank, which does not say from whom it takes."""
    source, x = call.root % world.size, call.data(world)
    found = None
    if world.rank == source:
        dist.send(x, dst=(source + 1) % world.size, group=world.group)
    elif world.rank == (source + 1) % world.size:
        found = dist.recv(x, group=world.group)
    return None, (found, x)


def ring(world: af.World, call: Collective) -> Posted:
    """Send to the next rank and receive from the one before, at once."""
    after, before = ((world.rank + i) % world.size for i in (1, -1))
    x, got = call.data(world), call.empty(world)
    pair = [
        dist.P2POp(dist.isend, x, after, group=world.group),
        dist.P2POp(dist.irecv, got, before, group=world.group),
    ]
    for work in dist.batch_isend_irecv(pair):
        work.wait()
    return None, got


def all_gather_object(world: af.World, call: Collective) -> Posted:
    got: list[Any] = [None] * world.size
    mine = {"rank": world.rank, "numbers": call.numbers}
    dist.all_gather_object(got, mine, group=world.group)
    return None, got


def broadcast_object(world: af.World, call: Collective) -> Posted:
    carried: list[Any] = [world.rank, call.numbers]
    dist.broadcast_object_list(carried, src=call.root % world.size, group=world.group)
    return None, carried


CALLS: dict[str, Callable[[af.World, Collective], Posted]] = {
    call.__name__: call
    for call in (
        *(
            all_reduce,
            reduce,
            broadcast,
            all_gather,
            all_gather_single,
            gather,
            scatter,
        ),
        *(
            reduce_scatter,
            reduce_scatter_single,
            all_to_all,
            all_to_all_uneven,
            barrier,
        ),
        *(send_recv, recv_from_any, ring, all_gather_object, broadcast_object),
    )
}
