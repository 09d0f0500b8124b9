# SPDX-License-Identifier: Apache-2.0
"""Collectives written out as the messages of which they are made, to count what they send.

Each rank gives as many bytes as there are ranks times `n`, or n where it says so.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist

import accelfn as af


def exchanged(world: af.World, to: int | None, count: int, source: int | None) -> None:
    """Send so many bytes to one rank while as many come from another; None is nobody."""
    given, got = (torch.zeros(count, dtype=torch.uint8) for _ in "ab")
    sent = None
    if to is not None:
        sent = dist.isend(given, group_dst=to, group=world.group)
    if source is not None:
        dist.recv(got, group_src=source, group=world.group)
    if sent is not None:
        sent.wait()


def round_the_ring(world: af.World, n: int) -> None:
    """Pass a part on to the next rank, as often as there are others."""
    size, rank = world.size, world.rank
    for _ in range(size - 1):
        exchanged(world, (rank + 1) % size, n, (rank - 1) % size)


def ring_all_reduce(world: af.World, n: int) -> None:
    """Of n bytes for each rank: sums go round, and then round again."""
    round_the_ring(world, n)
    round_the_ring(world, n)


def ring_pipeline(world: af.World, n: int) -> None:
    """From rank to rank, part by part: each passes on all that it gets."""
    size, rank = world.size, world.rank
    for _ in range(size):
        exchanged(
            world, rank + 1 if rank + 1 < size else None, n, rank - 1 if rank else None
        )


def to_the_root(world: af.World, n: int) -> None:
    """Each rank's own n bytes."""
    for rank in range(1, world.size):
        if world.rank == rank:
            exchanged(world, 0, n, None)
        elif not world.rank:
            exchanged(world, None, n, rank)


def from_the_root(world: af.World, n: int) -> None:
    """To each rank its own n bytes."""
    for rank in range(1, world.size):
        if world.rank == rank:
            exchanged(world, None, n, 0)
        elif not world.rank:
            exchanged(world, rank, n, None)


def tree(world: af.World, n: int) -> None:
    """All n bytes per rank, from those that have them to as many others, time after time."""
    have = 1
    while have < world.size:
        if world.rank < have and world.rank + have < world.size:
            exchanged(world, world.rank + have, n * world.size, None)
        elif have <= world.rank < 2 * have:
            exchanged(world, None, n * world.size, world.rank - have)
        have *= 2


def back_and_forth(world: af.World, n: int) -> None:
    """A tree to the root, and one from it; the way does not count."""
    tree(world, n)
    tree(world, n)


def gloo_reduce(world: af.World, n: int) -> None:
    """Sums go round the ring, and the root gathers them."""
    round_the_ring(world, n)
    to_the_root(world, n)


Counted = Callable[[af.World, int], None]


def bytes_like(n: int) -> torch.Tensor:
    return torch.zeros(n, dtype=torch.uint8)


def all_reduce(world: af.World, n: int) -> None:
    dist.all_reduce(bytes_like(n * world.size), group=world.group)


def reduce(world: af.World, n: int) -> None:
    dist.reduce(bytes_like(n * world.size), group_dst=0, group=world.group)


def broadcast(world: af.World, n: int) -> None:
    dist.broadcast(bytes_like(n * world.size), group_src=0, group=world.group)


def reduce_scatter(world: af.World, n: int) -> None:
    given = [bytes_like(n) for _ in range(world.size)]
    dist.reduce_scatter(bytes_like(n), given, group=world.group)


def reduce_scatter_single(world: af.World, n: int) -> None:
    given = bytes_like(n * world.size)
    dist.reduce_scatter_single(bytes_like(n), given, group=world.group)


def all_gather(world: af.World, n: int) -> None:
    got = [bytes_like(n) for _ in range(world.size)]
    dist.all_gather(got, bytes_like(n), group=world.group)


def gather(world: af.World, n: int) -> None:
    got = None if world.rank else [bytes_like(n) for _ in range(world.size)]
    dist.gather(bytes_like(n), got, group_dst=0, group=world.group)


def scatter(world: af.World, n: int) -> None:
    given = None if world.rank else [bytes_like(n) for _ in range(world.size)]
    dist.scatter(bytes_like(n), given, group_src=0, group=world.group)


def all_to_all(world: af.World, n: int) -> None:
    got, given = ([bytes_like(n) for _ in range(world.size)] for _ in "ab")
    dist.all_to_all(got, given, group=world.group)


def all_to_all_by_messages(world: af.World, n: int) -> None:
    """To each rank its own, from the nearest to the farthest."""
    size, rank = world.size, world.rank
    for away in range(1, size):
        exchanged(world, (rank + away) % size, n, (rank - away) % size)


MADE_OF: dict[tuple[str, Counted], Counted] = {
    ("ring", all_reduce): ring_all_reduce,
    ("ring", reduce_scatter): round_the_ring,
    ("ring", reduce_scatter_single): round_the_ring,
    ("ring", all_gather): round_the_ring,
    ("ring", broadcast): ring_pipeline,
    ("ring", reduce): ring_pipeline,
    ("ring", gather): to_the_root,
    ("ring", scatter): from_the_root,
    ("ring", all_to_all): all_to_all_by_messages,
    ("tree", all_reduce): back_and_forth,
    ("tree", broadcast): tree,
    ("tree", reduce): tree,
    ("gloo", reduce_scatter): ring_all_reduce,
    ("gloo", reduce): gloo_reduce,
}
"""By algorithm and collective, the messages that it is made of."""
