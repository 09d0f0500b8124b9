# SPDX-License-Identifier: Apache-2.0
"""What ranks pass on to the next, until it has been with all of them: a ring.

Each pass is under way while ranks compute with what they have.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist

from accelfn.collectives.failures import naming
from accelfn.world import World


def owners(ranks: World) -> list[int]:
    """Return whose tensors a rank has, in order: its own first, then those of ranks before it."""
    return [(ranks.rank - hop) % ranks.size for hop in range(ranks.size)]


def pass_ring(
    tensors: Sequence[torch.Tensor], ranks: World, *, label: str
) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield every rank's tensors, in the order of `owners`.

    The next ones travel while the caller has what was yielded.

    Args:
        tensors: of one dtype, and of the same shapes on all ranks.
        ranks: who passes them on.
        label: what the ranks are doing.
    """
    held = _flat(tensors)
    for _ in range(ranks.size - 1):
        coming = _RingStep(held, ranks, label)
        yield _split_flat(held, tensors)
        held = coming.arrived()
    yield _split_flat(held, tensors)


class Homewards:
    """Sums that go round behind what is passed on, and end with its owner."""

    def __init__(
        self, like: Sequence[torch.Tensor], ranks: World, *, label: str
    ) -> None:
        """Begin with zeros, of the dtype and shapes of what each rank has."""
        self._like, self._ranks, self._label = like, ranks, label
        self._begun = torch.zeros_like(_flat(like))
        self._coming: _RingStep | None = None

    def add(self, parts: Sequence[torch.Tensor], columns: slice) -> None:
        """Add to the sums of whose tensors this rank has, at places of dim 2; pass them on."""
        sums = self._begun if self._coming is None else self._coming.arrived()
        for whole, part in zip(_split_flat(sums, self._like), parts, strict=True):
            whole[:, :, columns] += part
        self._coming = _RingStep(sums, self._ranks, self._label)

    def arrived(self) -> tuple[torch.Tensor, ...]:
        """Return this rank's own sums, after as many additions as there are ranks."""
        sums = self._begun if self._coming is None else self._coming.arrived()
        return _split_flat(sums, self._like)


class _RingStep:
    """A vector on its way to the next rank, and the one that comes from before."""

    def __init__(self, sent: torch.Tensor, ranks: World, label: str) -> None:
        size = ranks.size
        leaving, coming = [0] * size, [0] * size
        leaving[(ranks.rank + 1) % size] = len(sent)
        coming[(ranks.rank - 1) % size] = len(sent)
        self._got, self._label, self._ranks = torch.empty_like(sent), label, ranks
        with naming(label, ranks):
            self._work: Any = dist.all_to_all_single(
                self._got, sent, coming, leaving, group=ranks.group, async_op=True
            )

    def arrived(self) -> torch.Tensor:
        with naming(self._label, self._ranks, begins=False):
            self._work.wait()
        return self._got


def _flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([each.flatten() for each in tensors])


def _split_flat(
    flat: torch.Tensor, like: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Return views of a vector, of these shapes."""
    parts = flat.split([each.numel() for each in like])
    return tuple(p.view(each.shape) for p, each in zip(parts, like, strict=True))


# Rows that ranks give one another while they go on, with links busy both ways at once.
#
# Gloo's all-to-all and all-gather begin to send before they ask for what is to come. Of two
# ranks the one that comes later finds the other's request there, sends all that it has, and
# its own request stands in line behind that: first one link is busy, then the other. So
# here each rank asks for everything before it sends anything. On a link of 1 Mbit/s that
# made an exchange of numbers in 8 bits a fifth faster.


_TAG_OF_PAIRS = 0x6163
"""Of the messages, so that those that a user's loop sends are none of them."""


class Work(Protocol):
    """What is under way."""

    def wait(self) -> object:
        """Return when it has arrived."""
        ...


def start_swap(got: torch.Tensor, given: torch.Tensor, ranks: World) -> Work:
    """Begin to give each rank its row of a tensor, and to get one from each."""
    if _by_gloo(got, ranks):
        return _Messages(got, given, ranks)
    begun = dist.all_to_all_single(got, given, group=ranks.group, async_op=True)
    return cast("Work", begun)


def start_spread(got: torch.Tensor, row: torch.Tensor, ranks: World) -> Work:
    """Begin to give all ranks one row, and to get one from each."""
    if _by_gloo(got, ranks):
        return _Messages(got, row.expand_as(got), ranks)
    begun = dist.all_gather(list(got), row, group=ranks.group, async_op=True)
    return cast("Work", begun)


def _by_gloo(got: torch.Tensor, ranks: World) -> bool:
    # what lies on a device Gloo takes in its collectives, and in no message
    is_there = got.device.type == "cpu"
    return is_there and ranks.connection.backend(got.device) == "gloo"


class _Messages:
    """A row to each other rank, and one from each."""

    def __init__(self, got: torch.Tensor, given: torch.Tensor, ranks: World) -> None:
        others = [(ranks.rank + hop) % ranks.size for hop in range(1, ranks.size)]
        among: dict[str, Any] = {"group": ranks.group, "tag": _TAG_OF_PAIRS}
        asked = [dist.irecv(got[each], group_src=each, **among) for each in others]
        sent = [dist.isend(given[each], group_dst=each, **among) for each in others]
        got[ranks.rank] = given[ranks.rank]
        self._works = cast("list[Work]", [*asked, *sent])
        self._given = given  # which must not go before it is sent

    def wait(self) -> None:
        for work in self._works:
            work.wait()


# Parts that Gloo carries from each rank to each other that needs them, and no further.
#
# For its own all-gather Gloo passes parts round a ring, in as many rounds as there are
# others, and for its reduce-scatter all ranks add up everything. On two processes a gather
# of 800 kB took 0.3 ms of the processor by all-to-all, and 0.8 by Gloo's own; a
# reduce-scatter took 0.3, and 1.2. Of 25 MB the first two took the same, and the last ones
# 6 ms and 15.
#
# Messages take some 0.6 of an all-to-all's time for large tensors, where ranks come to them
# together; where they do not, as among the units of a model, they take longer than one.


_TAG_OF_GLOO = 0x6167
"""Of the messages, so that those that a user's loop sends are none of them."""


def carries(group: Any, device: torch.device) -> bool:
    """Whether it is Gloo that joins the ranks of a group for what lies on the host."""
    if device.type != "cpu":
        return False
    return group._get_backend(device).name() == "gloo"


def gather_(whole: torch.Tensor, part: torch.Tensor, group: Any) -> None:
    """Fill a vector with all ranks' parts, in their order; `part` may lie in it."""
    given = part.repeat(group.size())
    dist.all_to_all_single(whole, given, group=group)


def reduce_scatter_(part: torch.Tensor, whole: torch.Tensor, group: Any) -> None:
    """Fill `part` with the sum of what all ranks have for this one, in the ranks' order."""
    rows = torch.empty_like(whole).view(group.size(), *part.shape)
    dist.all_to_all_single(rows.view_as(whole), whole, group=group)
    torch.sum(rows, 0, dtype=part.dtype, out=part)


def reduce_to_holders_(
    tensors: Sequence[torch.Tensor], holders: Sequence[int], group: Any
) -> None:
    """Sum tensors over the ranks, each where it is held; elsewhere they stay as they are.

    Each rank asks for all that is to come before it sends anything.

    Args:
        tensors: contiguous ones, of the same shapes on all ranks.
        holders: the rank of the group that holds each.
        group: which ranks.
    """
    size, rank = group.size(), group.rank()
    pairs = list(zip(tensors, holders, strict=True))
    mine = [tensor for tensor, holder in pairs if holder == rank]
    others = [each for each in range(size) if each != rank]
    got = {each: [torch.empty_like(tensor) for tensor in mine] for each in others}
    among: dict[str, Any] = {"group": group, "tag": _TAG_OF_GLOO}
    asked: list[Any] = [
        dist.irecv(tensor, group_src=each, **among)
        for each in others
        for tensor in got[each]
    ]
    sent: list[Any] = [
        dist.isend(tensor, group_dst=holder, **among)
        for tensor, holder in pairs
        if holder != rank
    ]
    for work in asked:
        work.wait()
    got[rank] = mine
    for i, tensor in enumerate(mine):
        total = got[0][i]
        for each in range(1, size):
            total.add_(got[each][i])
        if rank:
            tensor.copy_(total)
    for work in sent:
        work.wait()
