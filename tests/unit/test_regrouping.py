# SPDX-License-Identifier: Apache-2.0
"""How the processes of an elastic launch agree with their launcher on who is there."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import accelfn as af
from accelfn.errors import PeerFailedError, StateError, WorldError
from tests.internals import (
    Connection,
    Launched,
    WatchedStore,
    Words,
    meeting,
    open_store,
)
from tests.strategies import Run
from tests.waiting import wait_until

LONG = timedelta(seconds=30)


def launched(timeout=30.0, name="0.0"):
    """Return the world of a process as it meets others anew, and the launcher's words."""
    store = open_store("127.0.0.1", 0, LONG)
    process = Launched(
        *(store, name, ["0.0", "1.0"]),
        backend=None,
        device=torch.device("cpu"),
        timeout=timeout,
        is_newcomer=name != "0.0",
    )
    world = af.World(group=Connection(None, regrouping=process))
    return world, process, Words.at(store)


def test_a_rank_that_lives_and_does_not_come_is_named():
    """The others wait for it as long as for any collective, and no longer."""
    world, process, words = launched(timeout=0.1)
    with pytest.raises(PeerFailedError, match=r"Rank 0 of 2 .* but rank 1, which is"):
        process.meet(world)
    assert words.has_come(1, "0.0")


def test_who_was_missed_is_met_when_it_comes():
    """However often the others waited in vain, it is the same world that they wait for."""
    world, process, words = launched(timeout=0.05)
    for _ in range(3):
        with pytest.raises(PeerFailedError):
            process.meet(world)
    words.call(1, ["0.0"])
    met = process.meet(world)
    assert (met.rank, met.size) == (0, 1)


def test_one_that_is_gone_before_it_arrives_is_done_without():
    """Who was called together and lost one meanwhile comes again, and the rest go on."""
    world, process, words = launched()
    with ThreadPoolExecutor(1) as threads:
        met = threads.submit(process.meet, world)
        wait_until(lambda: words.has_come(1, "0.0"))
        words.call(1, ["0.0", "1.0"])
        words.lose("1.0")
        wait_until(lambda: words.has_come(2, "0.0"))
        words.call(2, ["0.0"])
        smaller = met.result()
    assert (smaller.rank, smaller.size) == (0, 1)
    assert world.connection.is_closed
    assert world.connection.successor is smaller


def test_one_that_is_gone_before_it_has_opened_is_done_without():
    """Who has arrived, and is gone before torch has joined it, is waited for no longer."""
    world, process, words = launched()
    with ThreadPoolExecutor(1) as threads:
        met = threads.submit(process.meet, world)
        words.arrive(1, "1.0")
        words.lose("1.0")
        words.call(1, ["0.0", "1.0"])
        wait_until(lambda: met.done() or words.has_come(2, "0.0"))
        words.call(2, ["0.0"])
        smaller = met.result()
    assert (smaller.rank, smaller.size) == (0, 1)
    assert not dist.is_initialized()


def test_who_live_and_cannot_be_joined_are_told_so():
    """A world that torch cannot open is no reason to meet again."""
    world, process, words = launched(timeout=0.1)
    words.call(1, ["0.0", "1.0"])
    words.arrive(1, "1.0")
    with pytest.raises(WorldError, match="Rank 0 of 2 cannot open"):
        process.meet(world)
    assert not words.has_come(2, "0.0")


def test_one_whose_end_is_noticed_later_is_done_without(monkeypatch):
    """Where torch cannot join ranks, the launcher has a while to notice which of them is gone."""
    world, process, words = launched()
    looks: list[bool] = []

    def is_gone(asked: Words, name: str) -> bool:
        looks.append(plain(asked, name))
        if len(looks) > 5:
            words.lose("1.0")
        return looks[-1]

    plain = Words.is_gone
    broke = mock.Mock(side_effect=WorldError("a connection broke"))
    monkeypatch.setattr(meeting, "open_default_group", broke)
    monkeypatch.setattr(Words, "is_gone", is_gone)
    words.call(1, ["0.0", "1.0"])
    words.arrive(1, "1.0")
    words.call(2, ["0.0"])
    smaller = process.meet(world)
    assert (smaller.rank, smaller.size) == (0, 1)
    assert words.has_come(2, "0.0")


def test_a_watched_store_tells_what_was_waited_for():
    """Its waits end with what was written, with one that is gone, or with a timeout."""
    gone: list[bool] = []
    store = WatchedStore(dist.HashStore(), lambda: bool(gone), timeout=0.1)
    store.set("a", b"1")
    assert (store.get("a"), store.add("n", 2), store.check(["b"])) == (b"1", 2, False)
    with pytest.raises(dist.DistStoreError, match=r"b was not written within 0\.1 s"):
        store.get("b")
    gone.append(True)
    with pytest.raises(dist.DistStoreError, match=r"ended before b was written"):
        store.wait(["b"], timedelta(seconds=0.2))
    store.wait(["a"], LONG)


def test_a_newcomer_waits_until_it_is_taken_in():
    """It is in a world of one until then, and counted among those that wait."""
    world, process, words = launched(name="1.2")
    with ThreadPoolExecutor(1) as threads:
        met = threads.submit(process.meet, world)
        wait_until(process.is_awaited)
        waits = words.waits("1.2"), words.waits("1.1")
        words.call(7, ["1.2"])
        words.take_in("1.2", 7)
        assert met.result().size == 1
    assert waits == (True, False)
    assert not process.is_awaited()
    assert not process.is_newcomer


def test_a_world_with_axes_is_not_regrouped():
    """Without a rank its axes would not be whole."""
    _, process, _ = launched()
    world = af.World(axes={"dp_shard": 1}, group=Connection(None, regrouping=process))
    state = Run(n=4).state(world)
    with pytest.raises(WorldError, match=r"a world with axes, \{'dp_shard': 1\}"):
        af.regroup(state)


def test_newcomers_alone_have_nothing_to_go_on_with():
    """Whoever was let in, and lost all who could hand a state over, is told so."""
    world, process, words = launched()
    process.is_newcomer = True
    state = Run(n=4).state(world)
    with ThreadPoolExecutor(1) as threads:
        regrouped = threads.submit(af.regroup, state)
        wait_until(process.is_awaited)
        words.call(3, ["0.0"])
        words.take_in("0.0", 3)
        with pytest.raises(StateError, match="ranks are newcomers"):
            regrouped.result()
