# SPDX-License-Identifier: Apache-2.0
"""`Link`: what joins a rank to the others, as two numbers and what headers add."""

import time
from typing import Any

import attrs
import torch

from accelfn.base.arguments import is_number
from accelfn.collectives import reduce, sum_
from accelfn.errors import ArgumentError, WorldError
from accelfn.testing.simulation.wire import Cost
from accelfn.world import World

_LABEL = "measure the link"
_TIMES = 10
_SECONDS = 0.2
_LARGEST = 2**28


def _at_least(least: float, *, above: bool = False) -> Any:
    def check(_link: object, field: Any, value: object) -> None:
        good = is_number(value) and (value > least if above else value >= least)
        if not good:
            what = f"above {least:g}" if above else f"of at least {least:g}"
            msg = f"Link({field.name}={value!r}): expected a number {what}."
            raise ArgumentError(msg)

    return attrs.field(validator=check, kw_only=True)


@attrs.frozen
class Link:
    """What joins each rank to the others: it sends and receives at once, one message at a time.

    Args:
        latency: seconds that a message takes, however small it is.
        bandwidth: bytes a second, in each direction; 1 Mbit/s is 125,000.
        overhead: what the network adds to a byte, in bytes: headers, and what says that they
            came. Over TCP in Ethernet's frames of 1,514 bytes it is 0.068: 66 for each 1,448,
            and 66 for every other frame of the opposite direction.

    Raises:
        ArgumentError: a number is negative, or the bandwidth is 0.

    Example:
        >>> Link(latency=0.0001, bandwidth=125_000)
        Link(latency=0.0001, bandwidth=125000, overhead=0.0)
    """

    latency: float = _at_least(0)
    bandwidth: float = _at_least(0, above=True)
    overhead: float = attrs.field(default=0.0, kw_only=True)

    @overhead.validator  # pyright: ignore[reportAttributeAccessIssue, reportUntypedFunctionDecorator]
    def _is_overhead(self, field: Any, value: object) -> None:
        if not is_number(value) or not value >= 0:
            msg = f"Link({field.name}={value!r}): expected a number of at least 0."
            raise ArgumentError(msg)

    def seconds(self, cost: Cost) -> float:
        """Return how long a collective takes on links like this one."""
        sent = cost.busiest * (1 + self.overhead)
        return cost.rounds * self.latency + sent / self.bandwidth

    @classmethod
    def measured(cls, world: World) -> "Link":
        """Return the link of a real world, by the fastest all-reduces of one number and of many.

        Every rank calls it and gets the same link, of the slowest rank. The bandwidth is that
        of the payload, so `overhead` is 0.

        Cost: a second or two; on a slow link, three all-reduces of 64 KiB.

        Raises:
            WorldError: the world has one rank, or is simulated and so takes no time.
        """
        if world.size == 1 or world.connection.simulated is not None:
            what = "one rank" if world.size == 1 else "simulated ranks"
            msg = (
                f"Link.measured: a world of {what} has no links. Call it on all ranks of a"
                " real world, or write Link(latency=..., bandwidth=...)."
            )
            raise WorldError(msg)
        _reduced(1, world)
        small = min(_reduced(1, world) for _ in range(_TIMES))
        count = 2**14
        large = _reduced(count, world)
        while large < _SECONDS and count < _LARGEST:
            count *= 4
            large = _reduced(count, world)
        large = min(large, *(_reduced(count, world) for _ in range(2)))
        rounds = 2 * (world.size - 1)
        busiest = 4 * (count - 1) * rounds / world.size
        latency = max(small, 0.0) / rounds
        return cls(latency=latency, bandwidth=busiest / max(large - small, 1e-9))


def _reduced(count: int, world: World) -> float:
    """Return the seconds in which the slowest rank summed so many floats."""
    values = torch.zeros(count, device=world.device)
    sum_(torch.zeros(1, device=world.device), world, label=_LABEL)
    start = time.perf_counter()
    sum_(values, world, label=_LABEL)
    values[:1].tolist()  # a device is waited for
    taken = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    return float(reduce(taken.to(world.device), world, "max", label=_LABEL))
