# SPDX-License-Identifier: Apache-2.0
"""The rendezvous: how the launchers of a run, one on each machine, connect to each other.

There are two kinds. For numbered machines, the user passes each machine its number and the
address of machine 0. torch's dynamic rendezvous numbers the machines itself, and machines can
join and leave, but its records are pickles.
"""

import socket
import struct
from contextlib import suppress
from datetime import timedelta
from ipaddress import ip_address
from typing import Self

from attrs import frozen
from torch.distributed import DistError, PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import (
    C10dRendezvousBackend,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from accelfn.errors import LaunchError
from accelfn.plug import connection, system

MAIN_PORT = 29500
JOIN_SECONDS = 300.0
_SIOCGIFADDR = 0x8915  # ioctl of Linux: get the address of an interface


@frozen(kw_only=True)
class Machines:
    """The machines of a run, and the address where they connect.

    Attributes:
        endpoint: the address of the rendezvous, `host:port`.
        run_id: distinguishes this run from other runs at the same endpoint.
        fewest: the minimum number of machines to start the run.
        most: the maximum number of machines.
        rank: this machine's number; None if the rendezvous assigns the number.
        join_seconds: how many seconds a machine waits for the other machines.
        address: the address of this machine for the other machines.
        interface: the network interface with this address, if known.
        is_here: whether this machine hosts the rendezvous.
    """

    # port 0: a free port; not the host name, which may not resolve
    endpoint: str = "127.0.0.1:0"
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
        counts: tuple[int, int],
        join_seconds: float,
        *,
        rank: int | None = None,
        run_id: str = "accelfn",
    ) -> Self:
        """Create the machines of a run that connect at `host:port`.

        The other arguments are described at the attributes of this class; `counts` is `fewest`
        and `most`. For one machine with a rank, port 0 means a free port.

        Raises:
            LaunchError: this machine cannot reach the host, or is the only machine, but does not
                have this address.
        """
        address, is_here = _look_towards(host, port)
        if counts[1] == 1 and rank is not None and not is_here:
            msg = (
                f"--main-address is {host!r}, but the run has only this machine, and that is"
                " not its address. Remove it, or pass --main-address 127.0.0.1."
            )
            raise LaunchError(msg)
        return cls(
            endpoint=f"{host}:{port}",
            run_id=run_id,
            fewest=counts[0],
            most=counts[1],
            rank=rank,
            join_seconds=join_seconds,
            address=address,
            interface=None if counts[1] == 1 else interface_of(address),
            is_here=is_here,
        )


@frozen(kw_only=True)
class Plan:
    """The processes that a launch starts on this machine, and their options.

    Attributes:
        nproc: the number of processes, at least 1.
        machines: the machines of the run; default: only this machine.
        max_restarts: how often all ranks are restarted after a rank failed.
        axes: the axes of the ranks' world, as text such as "dp_shard=4".
        least: the minimum number of ranks of an elastic run. If ranks are killed and at least
            this number is left, the run continues, and new processes join in `af.regroup`. None:
            the run ends if a rank is killed.
    """

    nproc: int
    machines: Machines = Machines()
    max_restarts: int = 0
    axes: str | None = None
    least: int | None = None


def _look_towards(host: str, port: int) -> tuple[str, bool]:
    """Return this machine's address for a host, and whether the host is this machine."""
    try:
        # an IPv6 address in `host:port` is in brackets
        addresses = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, target = addresses[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)  # for a datagram socket, connect sends nothing
            address = probe.getsockname()[0]
            return address, address == target[0] or ip_address(address).is_loopback
    except OSError as error:
        msg = (
            f"this machine cannot reach {host!r}: {error}. Pass an address of the main"
            " machine that this machine can reach."
        )
        raise LaunchError(msg) from error


def interface_of(address: str) -> str | None:
    """Return the name of the network interface with this IPv4 address; None if unknown."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asks:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = system.fcntl.ioctl(asks, _SIOCGIFADDR, request)
            except OSError:  # the interface has no IPv4 address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None


# The rendezvous handlers: accelfn's handler for numbered machines, torch's for other machines.
#
# Numbered machines only exchange a port number, as text. torch's dynamic rendezvous stores its
# state as a pickle, so everyone who can reach its store can run code in every launcher. After a
# restart, torch (2.13) also reuses the store of the first attempt, with the addresses of
# processes that have ended. accelfn's handler opens a new store for each attempt.


def handler_of(machines: Machines) -> RendezvousHandler:
    """Create the rendezvous handler for torch's agent; this may wait for machine 0."""
    if machines.rank is not None:
        return NumberedRendezvous(machines, machines.rank)
    host, port = machines.where
    seconds = int(machines.join_seconds)
    timeout = timedelta(seconds=seconds)
    store = None
    if machines.is_here:
        with suppress(DistError):  # another launcher here has opened the store
            is_local = machines.most == 1
            store = connection.open_store(host, port, timeout, is_local=is_local)
    if store is None:
        store = TCPStore(host, port, is_master=False, timeout=timeout)
    params = RendezvousParameters(
        "c10d",
        machines.endpoint,
        machines.run_id,
        machines.fewest,
        machines.most,
        local_addr=machines.address,
        join_timeout=seconds,
        # how long the minimum of machines waits for more machines; torch's default of 30 s
        # may be longer than join_timeout
        last_call_timeout=max(1, min(30, seconds // 2)),
    )
    backend = C10dRendezvousBackend(store, machines.run_id)
    return create_handler(store, backend, params)


class NumberedRendezvous(RendezvousHandler):
    """Connects numbered machines at machine 0, again for each attempt (start or restart)."""

    def __init__(self, machines: Machines, rank: int) -> None:
        """Store the machines and this machine's number; do not connect yet."""
        self._machines, self._rank = machines, rank
        self._host, self._port = machines.where
        self._timeout = timedelta(seconds=machines.join_seconds)
        self._agents: TCPStore | None = None
        self._ranks: TCPStore | None = None
        self._attempt = 0

    def get_backend(self) -> str:
        """Return the name of this rendezvous backend for torch."""
        return "numbered"

    @property
    def store(self) -> TCPStore:
        """The store that connects the launchers, and the ranks of the first attempt."""
        host, count = self._host, self._machines.most
        if self._agents is None and self._rank == 0:
            self._agents = self._open_store(self._port, size=count)
        if self._agents is None:
            self._agents = TCPStore(host, self._port, count, timeout=self._timeout)
        return self._agents

    @property
    def use_agent_store(self) -> bool:
        """Return True: ranks connect to the launcher's store instead of opening a store."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the other machines; return the store and address for the next attempt."""
        agents = self.store
        attempt, port = f"attempt {self._attempt}", agents.port
        if self._attempt:  # ranks of a restart need a new store, which machine 0 opens
            if self._rank == 0:
                self._ranks = self._open_store(0)
                agents.set(attempt, str(self._ranks.port))
            port = int(agents.get(attempt))
        self._attempt += 1
        return RendezvousInfo(
            PrefixStore(attempt, agents),
            self._rank,
            self._machines.most,
            RendezvousStoreInfo(self._host, port),
        )

    def _open_store(self, port: int, size: int | None = None) -> TCPStore:
        is_local = self._machines.most == 1
        return connection.open_store(
            self._host, port, self._timeout, size=size, is_local=is_local
        )

    def is_closed(self) -> bool:
        """Return False: the rendezvous is never closed."""
        return False

    def set_closed(self) -> None:
        """Do nothing: no machine can join later."""

    def num_nodes_waiting(self) -> int:
        """Return 0: no machine can join later."""
        return 0

    def get_run_id(self) -> str:
        """Return the id of this run."""
        return self._machines.run_id

    def shutdown(self) -> bool:
        """Return True: the stores are closed when this process ends."""
        return True
