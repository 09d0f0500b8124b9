# SPDX-License-Identifier: Apache-2.0
"""Point-to-point exchanges: a ring of ranks, and all-to-all by messages for Gloo.

In the ring, each rank sends its current tensors to the next rank while it computes with them.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist

from accelfn.collectives.failures import start
from accelfn.collectives.packed import carries
from accelfn.world import World


def owners(ranks: World) -> list[int]:
    """Return the ranks that own the tensors which a ring brings to this rank, in that order.

    This rank is first, because it starts with its own tensors.
    """
    return [(ranks.rank - hop) % ranks.size for hop in range(ranks.size)]


def pass_ring(
    tensors: Sequence[torch.Tensor], ranks: World, *, label: str
) -> Iterator[tuple[torch.Tensor, ...]]:
    """Pass tensors around a ring; yield every rank's tensors, in the order of `owners`.

    While the caller uses the yielded tensors, the next tensors are already being sent.

    Args:
        tensors: tensors of one dtype, with the same shapes on all ranks.
        ranks: the ranks of the ring.
        label: the operation, for errors.
    """
    current = _flat(tensors)
    for _ in range(ranks.size - 1):
        receive = _start_step(current, ranks, label)
        yield _split_flat(current, tensors)
        current = receive()
    yield _split_flat(current, tensors)


class Homewards:
    """Sums that go around the ring. Each rank adds to the sums, which end at their owner."""

    def __init__(
        self, like: Sequence[torch.Tensor], ranks: World, *, label: str
    ) -> None:
        """Start with sums of 0, with the dtype and shapes of the tensors `like`."""
        self._like, self._ranks, self._label = like, ranks, label
        sums = torch.zeros_like(_flat(like))
        self._receive: Callable[[], torch.Tensor] = lambda: sums

    def add(self, parts: Sequence[torch.Tensor], columns: slice) -> None:
        """Add `parts` to the current sums, in `columns` of dim 2, and send on the sums."""
        sums = self._receive()
        for total, part in zip(_split_flat(sums, self._like), parts, strict=True):
            total[:, :, columns] += part
        self._receive = _start_step(sums, self._ranks, self._label)

    def arrived(self) -> tuple[torch.Tensor, ...]:
        """Return this rank's sums after all ranks have added to them."""
        return _split_flat(self._receive(), self._like)


def _start_step(
    outgoing: torch.Tensor, ranks: World, label: str
) -> Callable[[], torch.Tensor]:
    """Send a vector to the next rank; return a function that receives the previous rank's."""
    size = ranks.size
    leaving, coming = [0] * size, [0] * size
    leaving[(ranks.rank + 1) % size] = len(outgoing)
    coming[(ranks.rank - 1) % size] = len(outgoing)
    got, among = torch.empty_like(outgoing), {"group": ranks.group, "async_op": True}
    begin = partial(dist.all_to_all_single, got, outgoing, coming, leaving, **among)
    wait = start(begin, label, ranks)

    def receive() -> torch.Tensor:
        wait()
        return got

    return receive


def _flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def _split_flat(
    flat: torch.Tensor, like: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Split a vector into views with the shapes of `like`."""
    parts = flat.split([tensor.numel() for tensor in like])
    return tuple(p.view(tensor.shape) for p, tensor in zip(parts, like, strict=True))


# An asynchronous exchange of rows that uses both directions of a link at the same time.
#
# Gloo's all-to-all and all-gather send before they post their receives. The later of two ranks
# finds the other's request, sends all of its data, and queues its own request behind this
# data. So the two directions of the link are used one after the other. Here each rank posts all
# receives before it sends. On a link of 1 Mbit/s, an exchange of 8-bit numbers took a fifth
# less time. Gloo sends tensors of accelerators only in collectives, not in such messages.


_TAG_OF_PAIRS = 0x6163
"""The tag of accelfn's messages; a user's own messages should have other tags."""


class Work(Protocol):
    """A collective that has been started."""

    def wait(self) -> object:
        """Wait until the collective is complete."""
        ...


def start_swap(got: torch.Tensor, outgoing: torch.Tensor, ranks: World) -> Work:
    """Start an all-to-all: send one row to each rank, and receive one row from each rank."""
    if carries(ranks.group, got.device):
        return _Messages(got, outgoing, ranks)
    work = dist.all_to_all_single(got, outgoing, group=ranks.group, async_op=True)
    return cast("Work", work)


def start_spread(got: torch.Tensor, row: torch.Tensor, ranks: World) -> Work:
    """Start an all-gather of one row per rank."""
    if carries(ranks.group, got.device):
        return _Messages(got, row.expand_as(got), ranks)
    work = dist.all_gather(list(got), row, group=ranks.group, async_op=True)
    return cast("Work", work)


class _Messages:
    """Point-to-point messages: one row to each other rank, and one row from each of them."""

    def __init__(self, got: torch.Tensor, outgoing: torch.Tensor, ranks: World) -> None:
        peers = [(ranks.rank + hop) % ranks.size for hop in range(1, ranks.size)]
        among: dict[str, Any] = {"group": ranks.group, "tag": _TAG_OF_PAIRS}
        receives = [dist.irecv(got[r], group_src=r, **among) for r in peers]
        sends = [dist.isend(outgoing[r], group_dst=r, **among) for r in peers]
        got[ranks.rank] = outgoing[ranks.rank]
        self._works = cast("list[Work]", [*receives, *sends])
        self._given = outgoing  # keeps the memory alive until it is sent

    def wait(self) -> None:
        for work in self._works:
            work.wait()
