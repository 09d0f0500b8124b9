# SPDX-License-Identifier: Apache-2.0
"""`Machines`: how the launchers of one run find each other, one on each machine.

On one machine they need not. On several, each is told its number and the address of
machine 0. Or they meet by torch's dynamic rendezvous, which numbers them itself and lets
them come and go, and whose records are pickles.
"""

from __future__ import annotations

import fcntl
import socket
import struct
from contextlib import closing
from ipaddress import ip_address

from attrs import frozen

from accelfn.errors import LaunchError

MAIN_PORT = 29500
JOIN_SECONDS = 300.0
_SIOCGIFADDR = 0x8915  # asks Linux for an interface's address


@frozen(kw_only=True)
class Machines:
    """The machines of one run, and how they meet.

    Attributes:
        endpoint: where the machines meet, `host:port`.
        run_id: what tells this run from others that meet there.
        fewest: how many machines it starts with.
        most: how many machines it may have.
        rank: this machine's number; None where the rendezvous gives it.
        join_seconds: how long a machine waits for the others.
        address: this machine's, as the others reach it.
        interface: the network interface that has the address, if one is known.
        is_here: whether the machines meet at this one.
    """

    endpoint: str = (
        "127.0.0.1:0"  # 0: a free port; its own name does not always resolve
    )
    run_id: str = "accelfn"
    fewest: int = 1
    most: int = 1
    rank: int | None = 0
    join_seconds: float = JOIN_SECONDS
    address: str = "127.0.0.1"
    interface: str | None = None
    is_here: bool = True

    @property
    def where(self) -> tuple[str, int]:
        """The host and the port of the endpoint."""
        host, _, port = self.endpoint.rpartition(":")
        return host.strip("[]"), int(port)

    @classmethod
    def meeting_at(
        cls,
        host: str,
        port: int,
        *,
        counts: tuple[int, int],
        join_seconds: float,
        rank: int | None = None,
        run_id: str = "accelfn",
    ) -> Machines:
        """Return machines that meet there, at least and at most so many; the rest as above.

        Of one machine with a rank the address is its own, and port 0 a free one.
        """
        own, is_here = _look_towards(host, port)
        if counts[1] == 1 and rank is not None and not is_here:
            msg = (
                f"--main-address is {host!r}, which is no address of this machine, and"
                " there is no other; leave it out, or give --main-address 127.0.0.1."
            )
            raise LaunchError(msg)
        return cls(
            endpoint=f"{host}:{port}",
            run_id=run_id,
            fewest=counts[0],
            most=counts[1],
            rank=rank,
            join_seconds=join_seconds,
            address=own,
            interface=None if counts[1] == 1 else interface_of(own),
            is_here=is_here,
        )


@frozen(kw_only=True)
class Plan:
    """The processes that a launch starts on this machine, and their options.

    Attributes:
        nproc: how many processes; at least 1.
        machines: those of the run; default this one alone.
        max_restarts: how often all ranks start again after one has failed.
        axes: of the ranks' world, as text.
        least: how many ranks must be left if others are killed, so that the run continues;
            new processes replace the killed ones in `af.regroup`. None: the run ends.
    """

    nproc: int
    machines: Machines = Machines()
    max_restarts: int = 0
    axes: str | None = None
    least: int | None = None


def _look_towards(host: str, port: int) -> tuple[str, bool]:
    """Return the address from which this machine reaches another, and whether that is itself."""
    try:
        # an IPv6 address stands in brackets before its port
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, target = found[0]
        with closing(socket.socket(family, kind, protocol)) as probe:
            probe.connect(target)  # a datagram's: nothing is sent
            own = probe.getsockname()[0]
            return own, own == target[0] or ip_address(own).is_loopback
    except OSError as error:
        msg = (
            f"this machine has no way to {host!r}: {error}. Give the main machine's"
            " address as this one reaches it."
        )
        raise LaunchError(msg) from error


def interface_of(address: str) -> str | None:
    """Return the name of the network interface that has an IPv4 address."""
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as asks:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(asks, _SIOCGIFADDR, request)
            except OSError:  # an interface without such an address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None
