# SPDX-License-Identifier: Apache-2.0
"""Ranks that fail tell each other so, and say what they have heard."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import attrs
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import accelfn as af
from accelfn.errors import PeerFailedError
from tests.internals import (
    Activity,
    Connection,
    Failure,
    RollCall,
    Standing,
    connection,
    naming,
    script,
)
from tests.states import linear_state
from tests.waiting import HANGS, wait_until

LOST = "Connection closed by peer"
GONE = "failed, left or did not arrive"


class Scripted(dist.Store):
    """A store whose host has been stopped, goes, or hears of rank 2 late.

    It takes what it is told, and counts how often somebody looked for another's word.
    """

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.asked = how, 0
        self.kept: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self.kept[key] = value

    def get(self, key: str) -> str:
        return self.kept[key]

    def check(self, keys: list[str]) -> bool:
        is_last = keys[0].endswith("/2")
        self.asked += is_last or self.how != "late"
        if self.how == "stopped":
            time.sleep(60)
        if self.how == "goes" and self.asked > 2:
            raise RuntimeError(LOST)
        is_heard = self.how == "late" and (not is_last or self.asked > 1)
        return is_heard and keys[0] in self.kept

    def delete_key(self, key: str) -> bool:
        return self.kept.pop(key, None) is not None


def worlds(size: int, store: dist.Store | None = None) -> list[af.World]:
    """Return the ranks' worlds, which meet at one store and have no backend."""
    shared = dist.HashStore() if store is None else store
    made: list[af.World] = []
    for rank in range(size):
        roll_call = RollCall(shared, rank, size, rank_0_keeps_it=True)
        connection = Connection(dist.ProcessGroup(rank, size), roll_call=roll_call)
        made.append(af.World(rank=rank, size=size, group=connection))
    return made


def lost(world: af.World, label: str = "sum") -> str:
    """Return what a rank says whose backend has lost a connection."""
    with pytest.raises(PeerFailedError) as caught, naming(label, world):
        raise RuntimeError(LOST)
    said = str(caught.value)
    assert said.endswith(f" ({LOST})")
    return said.removesuffix(f" ({LOST})").partition(", but ")[2]


def test_what_a_rank_raised_is_known_to_all():
    """The one whose fault it is is named, with its error and its update, or where it left."""
    first, second, third = worlds(3)
    third.connection.activity.step = 7
    third.connection.tell("raised ValueError: boom")
    for each in (first, second):
        assert lost(each) == "rank 2 raised ValueError: boom at update 7."
    assert str(Standing(how="left")) == "left"
    assert str(Standing(how="left", step=0)) == "left at update 0"


def test_an_update_that_is_over_is_said_so():
    """A rank that goes between two steps was not at the update before."""
    state = linear_state(3, world=af.World.single(device="cpu"))
    step = af.make_step(lambda net, x: net(x).square().mean())
    assert not state.world.connection.activity.is_between
    state, _ = step(state, torch.ones(2, 3))
    assert state.world.connection.activity.is_between
    first, second = worlds(2)
    second.connection.activity.step, second.connection.activity.is_between = 0, True
    second.connection.tell("raised ValueError: boom")
    assert lost(first) == "rank 1 raised ValueError: boom after update 0."


LOOK = "Look at its output for the cause."
SILENT = f"rank 0 or another rank {GONE}: the store of rank 0 does not answer."


@pytest.mark.parametrize(
    ("size", "words", "asks", "expected"),
    [
        # of four, two that wait hear each other, and blame those that say nothing
        (4, {0: "waits sum"}, [3, 0], f"ranks 1 and 2 {GONE}. {LOOK}"),
        # ranks that all waited are told apart by what they waited for
        (
            3,
            {2: "waits mean", 1: "waits sum"},
            [0],
            (
                "rank 2 waited in 'mean': the ranks make different calls. Make this call on"
                " every rank: is it inside `if world.is_main:`?"
            ),
        ),
        # a rank that waited, and then raises because of it, is not to blame
        (
            2,
            {1: "waits sum, raised PeerFailedError: of its own"},
            [0],
            "no rank failed: a rank arrived after the timeout, or a connection broke.",
        ),
    ],
)
def test_who_is_to_blame(size, words, asks, expected):
    """Who said nothing, who waited elsewhere, or nobody; a rank's first word counts."""
    made = worlds(size)
    for rank, said in words.items():
        for word in said.split(", "):
            kind, _, label = word.partition(" ")
            is_waiting = kind == "waits"
            told = f"waited in '{label}'" if is_waiting else word
            made[rank].connection.tell(told, is_waiting=is_waiting)
    assert [lost(made[rank]) for rank in asks] == [expected] * len(asks)


@pytest.mark.parametrize("how", ["stopped", "goes"])
def test_a_store_that_does_not_answer_blames_nobody_else(how):
    """After a second; who had not spoken before its host went may have spoken to nobody."""
    store = Scripted(how)  # of whose Python half torch keeps no reference
    assert lost(worlds(3, store)[1]) == SILENT


def test_one_that_waited_too_is_not_all_that_is_heard():
    """Who was waited for may speak a moment later, and is the one that is named."""
    store = Scripted("late")
    first, second, third = worlds(3, store)
    second.connection.tell("waited in 'sum'", is_waiting=True)
    third.connection.tell("raised ValueError: boom")
    assert lost(first) == "rank 2 raised ValueError: boom."


def test_a_world_hears_nothing_of_one_before_it():
    """Where ranks make a second world of one group, what became of the first is over."""
    store = dist.HashStore()
    _, left = worlds(2, store)
    left.connection.tell("raised ValueError: of the first world")
    first, _ = worlds(2, store)
    assert lost(first) == f"rank 1 {GONE}. {LOOK}"


@pytest.mark.parametrize("how", ["raised ValueError: boom", "left"])
def test_who_keeps_the_store_stays_for_the_others(how, monkeypatch):
    """Where it has failed, it waits for their word; a rank that just leaves does not."""
    monkeypatch.setattr(connection, "_ANSWERS_WITHIN", HANGS)
    first, second = worlds(2)
    assert first.connection.roll_call is not None
    assert second.connection.roll_call is not None
    first.connection.tell(how)
    staying = threading.Thread(target=first.connection.roll_call.linger)
    staying.start()
    staying.join(0.1 if how != "left" else HANGS)
    assert staying.is_alive() == (how != "left")
    second.connection.tell("waited in 'sum'", is_waiting=True)
    staying.join(HANGS)
    assert not staying.is_alive()
    second.connection.roll_call.linger()  # it keeps no store


@pytest.mark.parametrize(
    ("how", "rank", "keeps"),
    [
        ("left", 0, True),
        (None, 0, True),
        ("raised ValueError: boom", 1, True),
        ("raised ValueError: boom", 0, False),
    ],
)
def test_nobody_else_stays(how, rank, keeps):
    """Who leaves, is no keeper or leaves the store to a launcher asks nothing and goes on."""
    store = Scripted("silent")
    call = RollCall(store, rank, 3, rank_0_keeps_it=keeps)
    if how is not None:
        call.tell(how, Activity(), is_waiting=False)
    call.linger()
    assert store.asked == 0


class Writing(dist.Store):
    """One rank's side of a store: what it has of the others, in the order in which it came."""

    def __init__(self, store: dist.Store, rank: int, story: list[str]) -> None:
        super().__init__()
        self.store, self.rank, self.story = store, rank, story

    def set(self, key: str, value: bytes) -> None:
        self.story.append(f"{self.rank} says {key}")
        self.store.set(key, value)

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        self.story.append(f"{self.rank} waits")
        self.store.wait(keys, timeout)
        if self.rank:  # the answer comes late, when rank 0 has long had its own
            wait_until(
                lambda: self.story.count("0 waits") == 2 or "0 goes on" in self.story
            )
        self.story.append(f"{self.rank} has waited")

    def check(self, keys: list[str]) -> bool:
        return self.store.check(keys)

    def delete_key(self, key: str) -> bool:
        return self.store.delete_key(key)


@settings(max_examples=20)
@given(late=st.permutations(range(3)))
def test_no_rank_goes_while_another_is_being_joined(late: list[int]) -> None:
    """Ranks begin when all are joined, and rank 0 when nobody waits at its store any more."""
    store, story = dist.HashStore(), list[str]()
    sides = [Writing(store, rank, story) for rank in range(3)]
    calls = [RollCall(each, i, 3, rank_0_keeps_it=True) for i, each in enumerate(sides)]

    def begin(rank: int) -> None:
        calls[rank].begin(HANGS)
        story.append(f"{rank} goes on")

    ranks = {rank: threading.Thread(target=begin, args=(rank,)) for rank in late}
    for rank in late:
        ranks[rank].start()
        if rank != late[-1]:
            wait_until(lambda rank=rank: any(s.startswith(f"{rank} ") for s in story))
            assert ranks[rank].is_alive()
    for each in ranks.values():
        each.join(HANGS)
        assert not each.is_alive()
    goes = [story.index(f"{rank} goes on") for rank in range(3)]
    said = [
        next(i for i, s in enumerate(story) if s.startswith(f"{r} ")) for r in range(3)
    ]
    assert min(goes) > max(said)
    assert goes[0] > max(story.index(f"{rank} has waited") for rank in (1, 2))


def test_who_is_never_joined_is_named():
    """Nobody waits for it longer than the world's timeout, or than its store is there."""
    store = dist.HashStore()
    first, second, _ = (RollCall(store, i, 3, rank_0_keeps_it=True) for i in range(3))
    with ThreadPoolExecutor(1) as threads:
        waits = threads.submit(first.begin, 0.5)
        with pytest.raises(PeerFailedError, match=r"Rank 1 of 3 .* but rank 2 did not"):
            second.begin(0.5)
        with pytest.raises(PeerFailedError, match=r"Rank 0 of 3 .* rank 2 did not"):
            waits.result()
    gone = Scripted("goes")
    alone = RollCall(gone, 1, 2, rank_0_keeps_it=True)
    gone.asked = 2
    with pytest.raises(PeerFailedError, match=r"Rank 1 of 2 .* rank 0 did not"):
        alone.begin(0.5)


def test_who_met_anew_is_told_of_an_error():
    """A block that began in the old world and is broken off lets those of the new one hear."""
    (old, _), (new, other) = worlds(2), worlds(2)
    old.connection.successor = new
    with pytest.raises(ValueError, match="boom"), old:
        raise ValueError("boom")
    heard = other.connection.roll_call.hear()
    assert {rank: each.how for rank, each in heard.items()} == {
        0: "raised ValueError: boom"
    }


class TwoPartError(Exception):
    """An error that torch cannot raise anew: it takes more than a text."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


@attrs.frozen
class Broken:
    """A dataset whose samples cannot be read."""

    error: BaseException

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        raise self.error


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (ValueError("boom\nand more"), "ValueError: boom"),
        (KeyError("label"), "KeyError: 'label'"),
        (TwoPartError("no", "disk"), "tests.unit.test_roll_call.TwoPartError: no disk"),
    ],
)
def test_what_a_data_worker_raised_is_known_by_its_own_words(error, cause):
    """Other ranks and the launcher hear the cause, and not torch's text around it."""
    data = af.Data(Broken(error), global_batch_size=2, num_workers=1)
    first, second = worlds(2)
    state = linear_state(3, data=data)
    with pytest.raises(Exception, match="Caught ") as caught, second:  # noqa: PT012
        for batch in af.batches(state, until_epoch=1):
            pytest.fail(f"{batch} was read")
    where = f"{cause} (in DataLoader worker process 0)"
    assert lost(first) == f"rank 1 raised {where}."
    told = f"{caught.type.__name__}: {caught.value}"
    failure = Failure(rank=1, pid=7, status=1, at=1.0, error=told, traceback="")
    assert script._one_line(failure) == f"rank 1 followed: {where}"
