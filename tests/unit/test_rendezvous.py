# SPDX-License-Identifier: Apache-2.0
"""Where machines with numbers meet, and ranks of each attempt."""

import itertools
import pickle
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta
from functools import partial

import attrs
import pytest
import torch.distributed as dist

from tests.internals import MachinePlan as Plan
from tests.internals import (
    Machines,
    NumberedRendezvous,
    Place,
    connection,
    describe_plan,
    handler_of,
    meeting,
    open_store,
)
from tests.ports import free_port


def test_each_attempt_has_a_store_of_its_own():
    """Ranks of a later one would find the addresses of processes that are gone."""
    handler = NumberedRendezvous(Machines(), 0)
    found = [handler.next_rendezvous() for _ in range(3)]
    ports = [each.bootstrap_store_info.master_port for each in found]
    assert len(set(ports)) == 3
    assert {(each.rank, each.world_size) for each in found} == {(0, 1)}
    for attempt, each in enumerate(found):
        each.store.set("attempt", str(attempt))
    told = [each.store.get("attempt") for each in found]
    assert told == [b"0", b"1", b"2"]


@pytest.mark.parametrize("how", ["numbered", "dynamic"])
def test_machines_that_meet_on_the_loopback_listen_there_alone(how, monkeypatch):
    """Nobody from outside reaches their store; numbered machines read no pickle from it."""
    monkeypatch.setattr(pickle, "loads", lambda _: pytest.fail("a pickle is read"))
    port, seconds = free_port(), 30.0
    if how == "dynamic":
        machines = Machines.meeting_at("127.0.0.1", port, (1, 2), seconds)
        kept = [handler_of(machines), handler_of(machines)]  # the second one joins
    else:
        at = partial(Machines.meeting_at, "127.0.0.1", port, (2, 2), seconds)
        kept = [handler_of(at(rank=rank)) for rank in range(2)]
        for _ in range(2):
            with ThreadPoolExecutor(2) as pool:
                met = [*pool.map(lambda each: each.next_rendezvous(), kept)]
            assert [each.rank for each in met] == [0, 1]
            ports = {each.bootstrap_store_info.master_port for each in met}
            assert len(ports) == 1
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.2", ports.pop()), 5)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), 5)
    socket.create_connection(("127.0.0.1", port), 5).close()
    assert len(kept) == 2


@pytest.mark.slow
def test_the_fewest_machines_begin_before_they_give_up():
    """They wait for more no longer than they wait at all, and not torch's half minute."""
    machines = Machines.meeting_at("127.0.0.1", free_port(), (1, 2), 10)
    handler = handler_of(machines)
    try:
        found = handler.next_rendezvous()
    finally:
        handler.shutdown()
    assert (found.rank, found.world_size) == (0, 1)


def test_a_name_of_several_machines_is_no_loopback(monkeypatch):
    """Debian's machines know their own name as an address that others do not reach."""
    found = socket.getaddrinfo("127.0.0.1", 0, type=socket.SOCK_STREAM)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    bound = open_store("localhost", 0, timedelta(seconds=5), is_local=False)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", bound.port), 5)
    monkeypatch.setattr(
        connection, "_bound_to_loopback", lambda *_: pytest.fail("bound")
    )
    with pytest.raises(dist.DistError):  # torch looks for the name itself
        open_store("node0.invalid", 0, timedelta(seconds=1), is_local=False)


def test_ranks_of_an_attempt_meet_no_rank_of_another(monkeypatch):
    """At the store of a launcher that starts them anew, as torchrun's is, which lives on."""
    monkeypatch.setattr(meeting, "_worlds", itertools.repeat(0))  # of new processes
    kept = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    at = {"address": "127.0.0.1", "port": kept.port, "has_store": True}
    here = {"local_rank": 0, "local_size": 2, "node_rank": 0}
    place = Place(launcher="torchrun", rank=0, size=2, **here, **at)
    for attempt in range(3):
        ranks = [attrs.evolve(place, rank=r, attempt=attempt) for r in range(2)]
        with ThreadPoolExecutor(2) as pool:
            meetings = [meeting.Meeting(each, 30.0) for each in ranks]
            stores = [*pool.map(meeting._meet, meetings)]
        assert not stores[1].check(["attempt"])  # of one before
        stores[0].set("attempt", str(attempt))
        assert stores[1].get("attempt") == str(attempt).encode()


def test_ranks_share_the_cores(monkeypatch):
    """Each has its part of them, one at least, unless the user has said how many."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    for nproc, threads in ((2, 4), (3, 2), (8, 1), (9, 1)):
        rows = describe_plan(Plan(nproc=nproc))
        assert any(row.startswith(f"sets OMP_NUM_THREADS={threads} ") for row in rows)
    assert "OMP" not in "".join(describe_plan(Plan(nproc=1)))
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert "OMP" not in "".join(describe_plan(Plan(nproc=2)))


def test_ranks_of_several_machines_talk_towards_them(monkeypatch):
    """By the interface that leads there; those of one machine by its loopback."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    many = attrs.evolve(Machines(), most=2, address="10.0.0.7", interface="ib0")
    for machines, interface in ((Machines(), "lo"), (many, "ib0")):
        rows = "".join(describe_plan(Plan(nproc=1, machines=machines)))
        assert f"GLOO_SOCKET_IFNAME={interface} " in rows


SOON = timedelta(seconds=30)


def test_a_store_is_reached_where_it_was_said_to_be():
    """On any interface but the loopback it listens as torch has it."""
    own = socket.gethostbyname(socket.gethostname())
    for host in ("127.0.0.1", "localhost", own):
        store = open_store(host, 0, SOON)
        with closing(socket.create_connection((host, store.port), timeout=5)):
            store.set("key", "value")
        assert store.get("key") == b"value"


def test_a_port_that_is_taken_is_refused():
    """By another's socket, or by a store of this process that is not to be shared."""
    taken = socket.create_server(("127.0.0.1", 0))
    with closing(taken), pytest.raises(RuntimeError, match=r"in use|EADDRINUSE"):
        open_store("127.0.0.1", taken.getsockname()[1], SOON)
    first = open_store("127.0.0.1", 0, SOON, is_shared=True)
    with pytest.raises(RuntimeError, match=r"in use|EADDRINUSE"):
        open_store("127.0.0.1", first.port, SOON)
    first.set("key", "value")
    again = open_store("127.0.0.1", first.port, SOON, is_shared=True)
    assert again.get("key") == b"value"
