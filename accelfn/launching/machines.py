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

    @property
    def where(self) -> tuple[str, int]:
        """The host and the port of the endpoint."""
        host, _, port = self.endpoint.rpartition(":")
        return host.strip("[]"), int(port)

    @classmethod
    def numbered(
        cls, *, count: int, rank: int, address: str, port: int, join_seconds: float
    ) -> Machines:
        """Return machines that meet at machine 0, and this one's number among them.

        Of one machine the address is its own, and port 0 a free one.
        """
        own = _address_towards(address, port)
        if count == 1 and not is_here(address):
            msg = (
                f"--main-address is {address!r}, which is no address of this machine, and"
                " there is no other; leave it out, or give --main-address 127.0.0.1."
            )
            raise LaunchError(msg)
        return cls(
            endpoint=f"{address}:{port}",
            fewest=count,
            most=count,
            rank=rank,
            join_seconds=join_seconds,
            address=own,
            interface=None if count == 1 else interface_of(own),
        )

    @classmethod
    def dynamic(
        cls,
        *,
        endpoint: str,
        run_id: str,
        counts: tuple[int, int],
        join_seconds: float,
    ) -> Machines:
        """Return machines that meet by torch's dynamic rendezvous."""
        host, _, port = endpoint.rpartition(":")
        own = _address_towards(host, int(port))
        return cls(
            endpoint=endpoint,
            run_id=run_id,
            fewest=counts[0],
            most=counts[1],
            rank=None,
            join_seconds=join_seconds,
            address=own,
            interface=None if counts[1] == 1 else interface_of(own),
        )


def is_here(host: str) -> bool:
    """Return whether an address that this machine reaches is its own."""
    family, kind, protocol, _, (address, *_) = socket.getaddrinfo(
        host.strip("[]"), 0, type=socket.SOCK_DGRAM
    )[0]
    with closing(socket.socket(family, kind, protocol)) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def _address_towards(host: str, port: int) -> str:
    """Return the address from which this machine reaches another, or itself."""
    try:
        # an IPv6 address stands in brackets before its port
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, target = found[0]
        with closing(socket.socket(family, kind, protocol)) as probe:
            probe.connect(target)  # a datagram's: nothing is sent
            return probe.getsockname()[0]
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
