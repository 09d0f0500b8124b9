# SPDX-License-Identifier: Apache-2.0
"""Where the launchers of a run meet: numbered machines here, others as torch does it.

Numbered machines tell each other a port, as text. torch's dynamic rendezvous keeps its state
as a pickle, so everybody who can reach its store can run code in every launcher. It also gives
the ranks of a second attempt the store of the first, with the addresses of processes that are
gone (torch 2.13). Numbered machines have a store for each attempt.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

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

from accelfn.world.listening import open_store

if TYPE_CHECKING:
    from accelfn.launching.machines import Machines


def handler_of(machines: Machines) -> RendezvousHandler:
    """Return how machines meet, in torch's terms."""
    if machines.rank is not None:
        return NumberedRendezvous(machines, machines.rank)
    host, port = machines.where
    seconds = int(machines.join_seconds)
    timeout = timedelta(seconds=seconds)
    store = None
    if machines.is_here:
        with suppress(DistError):  # another launcher of this machine has opened it
            store = open_store(host, port, timeout, is_local=machines.most == 1)
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
    """Machines that know their numbers meet at machine 0, once for each attempt."""

    def __init__(self, machines: Machines, rank: int) -> None:
        """Connect to nothing yet."""
        self._machines, self._rank = machines, rank
        self._host, self._port = machines.where
        self._timeout = timedelta(seconds=machines.join_seconds)
        self._agents: TCPStore | None = None
        self._ranks: TCPStore | None = None
        self._attempt = 0

    def get_backend(self) -> str:
        """Return the name of this way to meet."""
        return "numbered"

    @property
    def store(self) -> TCPStore:
        """The store at which machines have met, and ranks of the first attempt do."""
        host, count = self._host, self._machines.most
        if self._agents is None and self._rank == 0:
            self._agents = self._open_store(self._port, size=count)
        if self._agents is None:
            self._agents = TCPStore(host, self._port, count, timeout=self._timeout)
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

    def _open_store(self, port: int, size: int | None = None) -> TCPStore:
        is_local = self._machines.most == 1
        return open_store(self._host, port, self._timeout, size=size, is_local=is_local)

    def _port_of(self, attempt: str, agents: TCPStore) -> int:
        """Return where ranks of a later attempt meet, which machine 0 says."""
        if self._rank == 0:
            self._ranks = self._open_store(0)
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
