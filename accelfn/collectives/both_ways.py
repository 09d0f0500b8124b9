# SPDX-License-Identifier: Apache-2.0
"""Rows that ranks give one another while they go on, with links busy both ways at once.

Gloo's all-to-all and all-gather begin to send before they ask for what is to come. Of two ranks
the one that comes later finds the other's request there, sends all that it has, and its own
request stands in line behind that: first one link is busy, then the other. So here each rank
asks for everything before it sends anything. On a link of 1 Mbit/s that made an exchange of
numbers in 8 bits a fifth faster.
"""

from typing import Any, Protocol, cast

import torch
import torch.distributed as dist

from accelfn.world import World

_TAG = 0x6163
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
        among: dict[str, Any] = {"group": ranks.group, "tag": _TAG}
        asked = [dist.irecv(got[each], group_src=each, **among) for each in others]
        sent = [dist.isend(given[each], group_dst=each, **among) for each in others]
        got[ranks.rank] = given[ranks.rank]
        self._works = cast("list[Work]", [*asked, *sent])
        self._given = given  # which must not go before it is sent

    def wait(self) -> None:
        for work in self._works:
            work.wait()
