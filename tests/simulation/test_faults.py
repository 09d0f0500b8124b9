# SPDX-License-Identifier: Apache-2.0
"""Faults: each happens once, to its rank, at its place, and the run ends with a report."""

import signal

import pytest
import torch
import torch.distributed as dist

import accelfn as af
from accelfn.testing import Corrupt, Crash, Leave, Raise, Stall, Terminate, simulate
from tests.internals import collectives

PeerFailed = af.errors.PeerFailedError


def three_sums(world):
    """Add up ranks three times, and return the sums."""
    got = []
    for _ in range(3):
        x = torch.tensor([float(world.rank), 1.0])
        dist.all_reduce(x, group=world.group)
        got.append(x.tolist())
    return got


def watched(fn):
    """Return the function, and what each rank raised in it."""
    errors = {}

    def rank(world):
        try:
            return fn(world)
        except BaseException as error:
            errors[world.rank] = error
            raise

    return rank, errors


def test_raise():
    """The rank raises what was planned, where it was planned; that is what is raised."""
    fn, errors = watched(three_sums)
    planned = ValueError("boom")
    with pytest.raises(ValueError, match="boom") as raised:
        simulate(3, fn, faults=[Raise(1, 2, error=planned)])
    assert raised.value is planned is errors[1]
    for rank in (0, 2):
        assert isinstance(errors[rank], PeerFailed)
        assert "rank 1 raised ValueError('boom') in #2 all_reduce" in str(errors[rank])


def test_raise_says_that_it_was_planned():
    """An error of no name in the plan is one that says so, and so is a class."""
    with pytest.raises(RuntimeError, match=r"planned fault: Raise\(rank=0, at=None"):
        simulate(1, three_sums, faults=[Raise(0)])
    with pytest.raises(OSError, match=r"planned fault: .*error=OSError\)"):
        simulate(1, three_sums, faults=[Raise(0, error=OSError)])


def test_leave():
    """The others wait for the rank that left, and are told."""
    fn, errors = watched(three_sums)
    with pytest.raises(af.errors.DeadlockError) as raised:
        simulate(2, fn, faults=[Leave(1, 2)])
    assert "rank 1: left early, as planned, in #2 all_reduce" in str(raised.value)
    assert not isinstance(errors[1], Exception)
    assert isinstance(errors[0], af.errors.DeadlockError)


def test_a_rank_that_left_has_no_result():
    """Nobody misses a rank that leaves where nobody waits for it."""

    def fn(world):
        if world.rank == 0:
            dist.send(torch.ones(1), 1, world.group)
        elif world.rank == 1:
            dist.recv(torch.ones(1), 0, world.group)
        else:
            dist.recv(torch.ones(1), 0, world.group)
        return world.rank

    assert simulate(3, fn, faults=[Leave(2)]).results == (0, 1, None)


def test_crash():
    """The rank is gone past every `except Exception`, and calls nothing any more."""
    caught = []

    def program(world):
        try:
            return three_sums(world)
        except Exception as error:
            caught.append(error)
            raise
        finally:
            if world.rank == 1:
                dist.all_reduce(torch.ones(2), group=world.group)

    fn, errors = watched(program)
    with pytest.raises(af.errors.RankCrashedError) as raised:
        simulate(2, fn, faults=[Crash(1, 2)])
    assert str(raised.value) == ("Rank 1 of 2 crashed, as planned, in #2 all_reduce.")
    assert caught == [errors[0]]
    assert isinstance(errors[0], PeerFailed)
    assert "rank 1 crashed, as planned," in str(errors[0])


def test_a_crashed_rank_cannot_return():
    """Also one that catches everything and goes on is gone."""

    def fn(world):
        try:
            dist.barrier(group=world.group)
        except BaseException:
            if world.rank == 0:
                raise
        return "alive"

    with pytest.raises(af.errors.RankCrashedError):
        simulate(2, fn, faults=[Crash(1)])


def test_short_stalls_cost_virtual_time():
    """The clock of the run says how long ranks waited; nobody waits in truth."""
    run = simulate(2, three_sums, faults=[Stall(1, 1, seconds=600.0)])
    assert run.results == simulate(2, three_sums).results
    assert run.clock == 600.0
    both = [Stall(1, 1, seconds=600.0), Stall(0, 1, seconds=100.0)]
    assert simulate(2, three_sums, faults=both).clock == 600.0
    after = [Stall(1, 1, seconds=600.0), Stall(0, 2, seconds=100.0)]
    assert simulate(2, three_sums, faults=after).clock == 700.0


@pytest.mark.parametrize("seconds", [1801.0, float("inf")])
def test_long_stalls_lose_the_rank(seconds):
    """After the timeout all are told who did not arrive."""
    fn, errors = watched(three_sums)
    with pytest.raises(PeerFailed, match="rank 1 did not arrive within 1800 s"):
        simulate(3, fn, faults=[Stall(1, 1, seconds=seconds)])
    assert set(errors) == {0, 1, 2}
    assert all(isinstance(error, PeerFailed) for error in errors.values())


def test_corrupt_changes_one_element_of_all_that_a_call_fills():
    """A gather fills a tensor a rank: the elements of each follow those of the one before."""

    def gathered(world):
        found = collectives.all_gather_list(torch.zeros(3), world, label="sum")
        return torch.cat(found).tolist()

    for element in range(8):
        wrong = simulate(2, gathered, faults=[Corrupt(1, 0, element=element)])
        assert wrong[0] == [0.0] * 6
        assert wrong[1] == [float(i == element % 6) for i in range(6)]


NAN = torch.tensor([[float("nan"), 2.0]])


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor([[True, False]]),
        torch.tensor([[1e30, 2.0]]),
        NAN,
        torch.tensor([[-3, 2]], dtype=torch.int8),
        torch.tensor([[1 + 2j, 2]]),
    ],
)
def test_corrupt_changes_values_of_any_kind(value):
    """What is received is not what was sent, though it be too large to count one up."""

    def fn(world):
        mine = value.clone()
        dist.broadcast(mine, 0, world.group)
        return mine

    clean, wrong = simulate(2, fn, faults=[Corrupt(1)])
    assert repr(clean[0, 0].tolist()) != repr(wrong[0, 0].tolist())  # a NaN is no other
    assert clean[0, 1] == wrong[0, 1]


def test_corrupt_waits_for_something_to_be_received():
    """What fills nothing, a barrier or a send, cannot be corrupted."""

    def fn(world):
        x = torch.zeros(1)
        with collectives.naming("sum", world):
            dist.barrier(group=world.group)
            dist.all_reduce(x, group=world.group)
        return x.item()

    run = simulate(2, fn, faults=[Corrupt(1, "sum")])
    assert run.results == (0.0, 1.0)
    assert simulate(2, fn, faults=[Corrupt(1, 0)]).missed == (Corrupt(1, 0),)


def test_terminate():
    """The process's handler runs in the rank; without one the rank ends as by a kill."""
    seen = []
    before = signal.signal(signal.SIGTERM, lambda *given: seen.append(given))
    try:
        run = simulate(2, three_sums, faults=[Terminate(1, 1)])
        assert run.results == simulate(2, three_sums).results
        assert seen == [(signal.SIGTERM, None)]
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        assert simulate(2, three_sums, faults=[Terminate(1, 1)]).missed == ()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with pytest.raises(af.errors.RankCrashedError, match="ended by SIGTERM"):
            simulate(2, three_sums, faults=[Terminate(1, 1)])
    finally:
        signal.signal(signal.SIGTERM, before)


def test_places():
    """By index, by the first of a label, by update; and each fault once."""

    def fn(world):
        got = []
        for step in range(3):
            world.connection.activity.step = step
            for label in ("a", "b"):
                x = torch.zeros(1)
                collectives.sum_(x, world, label=label)
                got.append(int(x.item()))
        return got

    def corrupted(*given, **named):
        return simulate(2, fn, faults=[Corrupt(1, *given, **named)])[1]

    assert corrupted(3) == [0, 0, 0, 1, 0, 0]
    assert corrupted("b") == [0, 1, 0, 0, 0, 0]
    assert corrupted("a", step=2) == [0, 0, 0, 0, 1, 0]
    assert corrupted(4, step=2) == [0, 0, 0, 0, 1, 0]
    assert corrupted(0, step=0) == [1, 0, 0, 0, 0, 0]
    too_late = Corrupt(1, 4, step=0)
    assert simulate(2, fn, faults=[too_late]).missed == (too_late,)
    both = simulate(2, fn, faults=[Corrupt(1, "a"), Corrupt(1, "a")])
    assert both[1] == [2, 0, 0, 0, 0, 0]


def test_faults_that_found_no_place_are_told():
    """A run says which faults it missed: a test of nothing must not look like one."""
    missed = [Crash(0, 7), Raise(1, "no such label"), Leave(0, 1, step=5)]
    run = simulate(2, three_sums, faults=[*missed, Stall(0, 1, seconds=1.0)])
    assert run.missed == tuple(missed)
    assert simulate(2, three_sums).missed == ()


@pytest.mark.parametrize(
    "fault",
    [
        Raise(1),
        Raise(1, 2, error=ValueError),
        Leave(0, "sum"),
        Crash(1, 3, step=2),
        Stall(1, seconds=2.0),
        Corrupt(1, element=3),
        Terminate(0),
    ],
)
def test_faults_are_values(fault):
    """They compare, hash, and print as what makes them."""
    names = {
        each.__name__: each for each in (Raise, Leave, Crash, Stall, Corrupt, Terminate)
    }
    names |= {
        "ValueError": ValueError,
        "RankFaultError": type(fault) is Raise and fault.error,
    }
    assert eval(repr(fault), names) == fault  # noqa: S307 - the test's own text
    assert hash(fault) == hash(eval(repr(fault), names))  # noqa: S307


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Raise(-1), r"rank=-1\): expected an integer"),
        (lambda: Crash(rank=True), r"rank=True\): expected an integer"),
        (lambda: Leave(0, -1), r"at=-1\): expected the index"),
        (lambda: Leave(0, at=True), r"at=True\): expected the index"),
        (lambda: Leave(0, 1.5), r"at=1.5\): expected the index"),
        (lambda: Leave(0, step=-1), r"step=-1\): expected an integer"),
        (lambda: Stall(0, seconds=-1), r"seconds=-1\): expected virtual seconds"),
        (lambda: Stall(0, seconds=float("nan")), r"seconds=nan\): expected virtual"),
        (
            lambda: Raise(0, error=KeyboardInterrupt),
            r"error=.*\): expected an exception",
        ),
        (lambda: Raise(0, error="boom"), r"error='boom'\): expected an exception"),
        (lambda: simulate(2, three_sums, faults=[Crash(2)]), "the last rank is 1"),
    ],
)
def test_faults_that_cannot_be(make, message):
    """They are refused where they are made."""
    with pytest.raises(af.errors.ArgumentError, match=message):
        make()
