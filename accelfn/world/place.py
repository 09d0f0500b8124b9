# SPDX-License-Identifier: Apache-2.0
"""`Place`: which rank of how many a process is; and what all launchers' words share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from attrs import frozen

from accelfn.errors import WorldError

Environment = Mapping[str, str]
THIS_MACHINE: Final = "127.0.0.1"


@frozen(kw_only=True)
class Place:
    """One process among those of its run.

    Attributes:
        launcher: who says so, for errors.
        rank: this process, of `size`.
        local_rank: this process among the `local_size` of its machine.
        node_rank: its machine.
        address: where rank 0 listens; with `port` None where there is one rank, which
            need not listen.
        attempt: how often a launcher has started ranks that met at the same store.
        has_store: whether a launcher listens there in rank 0's stead.
    """

    launcher: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    node_rank: int
    address: str | None = None
    port: int | None = None
    attempt: int = 0
    has_store: bool = False

    @property
    def is_alone(self) -> bool:
        """Whether there are no others to meet, nor an address to meet at."""
        return self.size == 1 and self.address is None


def check_place(place: Place, names: tuple[str, ...]) -> None:
    """Raise unless rank, size, local rank and local size fit, which have these names.

    Raises:
        WorldError: they do not.
    """
    ordered = 0 <= place.rank < place.size
    if not ordered or not 0 <= place.local_rank < place.local_size <= place.size:
        values = place.rank, place.size, place.local_rank, place.local_size
        shown = [f"{name}={value}" for name, value in zip(names, values, strict=True)]
        msg = (
            f"{', '.join(shown)} contradict each other: a rank is less than the number of"
            " ranks, of all and of its machine."
        )
        raise WorldError(msg)


def machine_of(env: Environment, place: Place) -> int:
    """Return the number of this machine, where ranks fill one after the other, all alike.

    `GROUP_RANK` (torchrun) or `NODE_RANK` (Ray Train, Lightning) says it of any others.

    Raises:
        WorldError: the ranks do not fill their machines so, and neither is given.
    """
    for name in ("GROUP_RANK", "NODE_RANK"):
        if name in env:
            return integer(env, name)
    machine, left = divmod(place.rank - place.local_rank, place.local_size)
    if left or machine < 0 or place.size % place.local_size:
        msg = (
            f"Rank {place.rank} of {place.size} has local rank {place.local_rank} of"
            f" {place.local_size}: the ranks do not fill one machine after the other, as"
            " many on each. Have mpirun map them by slot, or set GROUP_RANK to the number"
            " of each machine."
        )
        raise WorldError(msg)
    return machine


def given_port(env: Environment) -> int:
    """Return the port that somebody has chosen."""
    port = integer(env, "MASTER_PORT")
    if not 0 <= port < 2**16:
        msg = f"The environment variable MASTER_PORT is {port}; expected 0 to 65535."
        raise WorldError(msg)
    return port


def derived_port(number: int) -> int:
    """Return the port of a run; below 32768, where the system takes its own."""
    return 10_000 + number % 20_000


def integer(env: Environment, name: str) -> int:
    """Return a variable's value.

    Raises:
        WorldError: it is no integer.
    """
    try:
        return int(env[name])
    except ValueError:
        msg = f"The environment variable {name} is {env[name]!r}; expected an integer."
        raise WorldError(msg) from None
