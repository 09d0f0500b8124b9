# SPDX-License-Identifier: Apache-2.0
"""Where the launchers of a run meet: numbered machines here, others as torch does it.

torch's own rendezvous gives the ranks of a second attempt the store of the first, in which
they find the addresses of processes that are gone (torch 2.13). Here each attempt has a store
of its own.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import TYPE_CHECKING

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from accelfn.launching.machines import NUMBERED
from accelfn.world.listening import open_store

if TYPE_CHECKING:
    from accelfn.launching.machines import Machines


def handler_of(machines: Machines) -> RendezvousHandler:
    """Return how machines meet, in torch's terms."""
    if machines.rank is not None:
        return NumberedRendezvous(machines, machines.rank)
    if machines.backend != "c10d" or not _is_here(machines):
        return _torchs(machines)
    # torch asks its machine's name for an address, which often is another one
    try:
        return _torchs(machines, is_host=True)
    except RendezvousConnectionError:  # another launcher of this machine does it
        return _torchs(machines, is_host=False)


def _is_here(machines: Machines) -> bool:
    """Whether the machines meet at this one."""
    host = machines.endpoint.rpartition(":")[0].strip("[]")
    return any(
        where[0] == machines.address
        for *_, where in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    )


def _torchs(machines: Machines, **options: bool) -> RendezvousHandler:
    seconds = int(machines.join_seconds)
    return get_rendezvous_handler(
        RendezvousParameters(
            machines.backend,
            machines.endpoint,
            machines.run_id,
            machines.fewest,
            machines.most,
            local_addr=machines.address,
            timeout=seconds,
            join_timeout=seconds,
            **options,
        )
    )


class NumberedRendezvous(RendezvousHandler):
    """Machines that know their numbers meet at machine 0, once for each attempt."""

    def __init__(self, machines: Machines, rank: int) -> None:
        """Connect to nothing yet."""
        self._machines, self._rank = machines, rank
        host, _, port = machines.endpoint.rpartition(":")
        self._host, self._port = host.strip("[]"), int(port)
        self._timeout = timedelta(seconds=machines.join_seconds)
        self._agents: TCPStore | None = None
        self._ranks: TCPStore | None = None
        self._attempt = 0

    def get_backend(self) -> str:
        """Return the name of this way to meet."""
        return NUMBERED

    @property
    def store(self) -> TCPStore:
        """The store at which machines have met, and ranks of the first attempt do."""
        if self._agents is None:
            self._agents = self._meet()
        return self._agents

    @property
    def use_agent_store(self) -> bool:
        """Whether ranks find a store, and start none."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the other machines, and return what ranks meet at."""
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

    def _meet(self) -> TCPStore:
        """Return the store of the launchers, once all are there."""
        if self._machines.most == 1:
            return open_store(self._host, self._port, self._timeout)
        return TCPStore(
            self._host,
            self._port,
            self._machines.most,
            self._rank == 0,
            self._timeout,
        )

    def _port_of(self, attempt: str, agents: TCPStore) -> int:
        """Return where ranks of a later attempt meet, which machine 0 says."""
        if self._rank == 0:
            self._ranks = open_store(self._host, 0, self._timeout)
            agents.set(attempt, str(self._ranks.port))
        return int(agents.get(attempt))

    def is_closed(self) -> bool:
        """Return whether nobody can join any more."""
        return False

    def set_closed(self) -> None:
        """Do nothing: there is nobody to join."""

    def num_nodes_waiting(self) -> int:
        """Return 0: all machines are there from the start."""
        return 0

    def get_run_id(self) -> str:
        """Return what tells this run from others."""
        return self._machines.run_id

    def shutdown(self) -> bool:
        """Return True: the stores go with this process."""
        return True
