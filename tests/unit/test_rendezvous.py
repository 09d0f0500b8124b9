# SPDX-License-Identifier: Apache-2.0
"""Where machines with numbers meet, and ranks of each attempt."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import attrs
import pytest
import torch.distributed as dist

from accelfn.launching.machines import Machines
from accelfn.launching.rendezvous import NumberedRendezvous
from accelfn.launching.script import planned
from accelfn.launching.settings import Settings
from accelfn.world import meeting
from accelfn.world.place import Place


def test_each_attempt_has_a_store_of_its_own() -> None:
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


def test_ranks_of_an_attempt_meet_no_rank_of_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At the store of a launcher that starts them anew, as torchrun's is, which lives on."""
    monkeypatch.setattr(meeting, "_worlds", itertools.repeat(0))  # of new processes
    kept = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = Place(
        launcher="torchrun",
        rank=0,
        size=2,
        local_rank=0,
        local_size=2,
        node_rank=0,
        address="127.0.0.1",
        port=kept.port,
        has_store=True,
    )
    for attempt in range(3):
        ranks = [attrs.evolve(place, rank=r, attempt=attempt) for r in range(2)]
        with ThreadPoolExecutor(2) as pool:
            stores = [*pool.map(lambda each: meeting._meet(each, 30.0), ranks)]
        assert not stores[1].check(["attempt"])  # of one before
        stores[0].set("attempt", str(attempt))
        assert stores[1].get("attempt") == str(attempt).encode()


def test_an_elastic_run_begins_with_its_fewest_machines() -> None:
    """FEWEST:MOST are the numbers that torch is given; one number is both."""
    told = {"rdzv_endpoint": "127.0.0.1:29400", "rdzv_id": "mine"}
    for count, expected in (("2:4", (2, 4)), ("3", (3, 3)), ("1:1", (1, 1))):
        found = Settings.of({**told, "num_machines": count}, {}, "").machines()
        assert (found.fewest, found.most) == expected


def test_ranks_share_the_cores(monkeypatch) -> None:
    """Each has its part of them, one at least, unless the user has said how many."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    for nproc, threads in ((2, 4), (3, 2), (8, 1), (9, 1)):
        rows = planned(nproc=nproc, machines=Machines(), axes=None)
        assert any(row.startswith(f"sets OMP_NUM_THREADS={threads} ") for row in rows)
    assert not any(
        "OMP" in row for row in planned(nproc=1, machines=Machines(), axes=None)
    )
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert not any(
        "OMP" in row for row in planned(nproc=2, machines=Machines(), axes=None)
    )


def test_ranks_of_several_machines_talk_towards_them(monkeypatch) -> None:
    """By the interface that leads there; those of one machine by its loopback."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    alone = Machines()
    assert any(
        "GLOO_SOCKET_IFNAME=lo" in r
        for r in planned(nproc=1, machines=alone, axes=None)
    )
    many = attrs.evolve(alone, most=2, address="10.0.0.7", interface="ib0")
    assert any(
        "GLOO_SOCKET_IFNAME=ib0" in r
        for r in planned(nproc=1, machines=many, axes=None)
    )
