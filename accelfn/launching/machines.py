# SPDX-License-Identifier: Apache-2.0
"""The rendezvous of the launchers of a run, one launcher on each machine.

One machine needs no rendezvous. On several machines, the user gives each machine its number and
the address of machine 0. Or the machines use torch's dynamic rendezvous, which numbers machines
and lets them come and go, but stores its records as pickles.
"""

from __future__ import annotations

import socket
import struct
from contextlib import closing, suppress
from datetime import timedelta
from ipaddress import ip_address

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
_SIOCGIFADDR = 0x8915  # asks Linux for an interface's address


@frozen(kw_only=True)
class Machines:
    """The machines of a run, and their rendezvous.

    Attributes:
        endpoint: the address of the rendezvous, `host:port`.
        run_id: distinguishes this run from other runs at the same endpoint.
        fewest: the number of machines that the run needs to start.
        most: the maximum number of machines.
        rank: this machine's number; None if the rendezvous assigns the number.
        join_seconds: seconds that a machine waits for the other machines.
        address: this machine's address for the other machines.
        interface: the network interface with this address, if known.
        is_here: whether this machine hosts the rendezvous.
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
        """Return machines that meet at an endpoint; arguments as the attributes.

        For one machine with a rank, the address is its own, and port 0 means a free port.
        """
        address, is_here = _look_towards(host, port)
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
            address=address,
            interface=None if counts[1] == 1 else interface_of(address),
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
    """Return this machine's address towards a host, and whether the host is this machine."""
    try:
        # an IPv6 address has brackets before its port
        addresses = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, target = addresses[0]
        with closing(socket.socket(family, kind, protocol)) as probe:
            probe.connect(target)  # a datagram's: nothing is sent
            address = probe.getsockname()[0]
            return address, address == target[0] or ip_address(address).is_loopback
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
                answer = system.fcntl.ioctl(asks, _SIOCGIFADDR, request)
            except OSError:  # an interface without such an address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None


# The rendezvous handlers: accelfn's for numbered machines, torch's for others.
#
# Numbered machines exchange a port as text. torch's dynamic rendezvous stores its state as a
# pickle, so everyone who can reach its store can run code in every launcher. It also reuses the
# store of the first attempt in the second, with the addresses of processes that have ended
# (torch 2.13). Numbered machines have a store for each attempt.


def handler_of(machines: Machines) -> RendezvousHandler:
    """Return the rendezvous handler for torch's agent."""
    if machines.rank is not None:
        return NumberedRendezvous(machines, machines.rank)
    host, port = machines.where
    seconds = int(machines.join_seconds)
    timeout = timedelta(seconds=seconds)
    store = None
    if machines.is_here:
        with suppress(DistError):  # another launcher of this machine has opened it
            store = connection.open_store(
                host, port, timeout, is_local=machines.most == 1
            )
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
        # the fewest wait for more only a part of it; torch's half minute may be all of it
        last_call_timeout=max(1, min(30, seconds // 2)),
    )
    backend = C10dRendezvousBackend(store, machines.run_id)
    return create_handler(store, backend, params)


class NumberedRendezvous(RendezvousHandler):
    """Rendezvous of numbered machines at machine 0, once for each attempt."""

    def __init__(self, machines: Machines, rank: int) -> None:
        """Take the machines and this machine's number, without connecting."""
        self._machines, self._rank = machines, rank
        self._host, self._port = machines.where
        self._timeout = timedelta(seconds=machines.join_seconds)
        self._agents: TCPStore | None = None
        self._ranks: TCPStore | None = None
        self._attempt = 0

    def get_backend(self) -> str:
        """Return the name of this rendezvous backend."""
        return "numbered"

    @property
    def store(self) -> TCPStore:
        """The store of the machines, which ranks of the first attempt use too."""
        host, count = self._host, self._machines.most
        if self._agents is None and self._rank == 0:
            self._agents = self._open_store(self._port, size=count)
        if self._agents is None:
            self._agents = TCPStore(host, self._port, count, timeout=self._timeout)
        return self._agents

    @property
    def use_agent_store(self) -> bool:
        """Return whether ranks use the agent's store instead of starting a store."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the other machines, and return the ranks' store and address."""
        agents = self.store
        attempt, port = f"attempt {self._attempt}", agents.port
        if self._attempt:
            port = self._port_of(attempt, agents)
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

    def _port_of(self, attempt: str, agents: TCPStore) -> int:
        """Return the port for ranks of a later attempt, which machine 0 chooses."""
        if self._rank == 0:
            self._ranks = self._open_store(0)
            agents.set(attempt, str(self._ranks.port))
        return int(agents.get(attempt))

    def is_closed(self) -> bool:
        """Return whether the rendezvous is closed."""
        return False

    def set_closed(self) -> None:
        """Do nothing: all machines are there from the start."""

    def num_nodes_waiting(self) -> int:
        """Return 0: all machines are there from the start."""
        return 0

    def get_run_id(self) -> str:
        """Return the identity of this run."""
        return self._machines.run_id

    def shutdown(self) -> bool:
        """Return True: the stores go with this process."""
        return True
