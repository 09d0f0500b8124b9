# SPDX-License-Identifier: Apache-2.0
"""What the launcher makes of how ranks ended."""

import signal
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.internals import Ended, Failure, by_cause

LEFT = {"error": "SystemExit: 143", "status": 143}
INTERRUPTED = {"error": "SystemExit: 130", "status": 130}
ENDED = {"error": "", "status": -signal.SIGTERM, "ended_by_us": True}
FAILED = {"error": "ValueError: boom", "status": 1}
KILLED = {"error": "", "status": -signal.SIGKILL}


@pytest.mark.parametrize(
    ("how", "all_left"),
    [
        ([LEFT], True),
        ([LEFT, LEFT], True),
        ([LEFT, ENDED], True),
        ([LEFT, ENDED, LEFT], True),
        ([INTERRUPTED, ENDED], True),
        ([ENDED, LEFT], False),
        ([ENDED], False),
        ([LEFT, FAILED], False),
        ([FAILED, LEFT], False),
        ([LEFT, KILLED], False),
        ([{**LEFT, "status": 1}], False),
    ],
)
def test_ranks_that_were_asked_to_end_have_left(how, all_left):
    """They left by the signal's own exit, or were ended before they could, and none failed."""
    failures = [
        Failure(rank=rank, pid=100 + rank, at=float(rank), traceback="", **each)
        for rank, each in enumerate(how)
    ]
    assert Ended(failures, [], 0.0).left_on_signal == all_left


def ended(rank: int, status: int, error: str, at: float) -> Any:
    """Return what torch's agent has of a rank's end."""
    told = {"py_callstack": error, "time": at, "status": status}
    message = {"message": error, "extraInfo": told} if error else ""
    return SimpleNamespace(
        pid=100 + rank,
        local_rank=rank,
        exitcode=status,
        error_file_data={"message": message},
    )


@given(ranks=st.permutations(range(3)), later=st.sampled_from([0.5, 2.0, 40.0]))
def test_who_left_because_it_was_asked_to_is_not_to_blame(ranks, later):
    """Of ranks that left on the launcher's signal and one that hangs, that one comes first."""
    lost, left, hangs = ranks
    failures = {
        lost: ended(lost, 1, "PeerFailedError: it did not arrive", 1000.0),
        left: ended(left, 143, "SystemExit: 143", 1000.0 + later),
        hangs: ended(hangs, -signal.SIGKILL, "", 1030.0),
    }
    stacks = {hangs: '  File "train.py", line 7, in hang'}
    watch: Any = SimpleNamespace(stopped=set(), failed_at={lost: 1000.0}, stacks=stacks)
    first, *others = by_cause(failures, watch)
    assert first.rank == hangs
    assert {each.rank for each in others} == {lost, left}


def failure(rank: int, status: int, **told: Any) -> Failure:
    """Return how a rank ended that left no record."""
    how = {"error": "", "traceback": "", "at": 3.0 + rank, **told}
    return Failure(rank=rank, pid=100 + rank, status=status, **how)


@pytest.mark.parametrize(
    ("how", "ending", "why"),
    [
        (failure(1, -signal.SIGKILL), "killed by SIGKILL", "when memory runs out"),
        (
            failure(1, -signal.SIGTERM),
            "killed by SIGTERM",
            "a person or a scheduler end",
        ),
        (failure(1, -signal.SIGABRT), "killed by SIGABRT", "Gloo aborts a process"),
        (
            failure(1, -signal.SIGSEGV),
            "killed by SIGSEGV",
            "after 'Fatal Python error'.\n",
        ),
        (failure(1, 5), "exit code 5", "ended itself without an exception (os._exit"),
        (
            failure(1, -signal.SIGSTOP, was_stopped=True),
            "stopped by SIGSTOP",
            "a person or a debugger stopped this process",
        ),
        (
            failure(1, -signal.SIGSTOP, was_stopped=True, did_not_arrive=True),
            "stopped by SIGSTOP",
            "a person or a debugger stopped this process",
        ),
        (
            failure(1, -signal.SIGKILL, did_not_arrive=True, stack="  in hang"),
            "the other ranks waited for it",
            "Its stack, most recent call first:\n  in hang\n",
        ),
        (
            failure(1, -signal.SIGKILL, did_not_arrive=True),
            "the other ranks waited for it",
            "It had not raised an error; the launcher ended it.\n",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_a_rank_without_a_traceback_may_have_met(how, ending, why):
    """How it ended is told with what ends a process so, and with no other cause."""
    told = Ended([how], [0, 1], 1.5).report + "\n"
    assert told.startswith(f"rank 1 failed first ({ending}, pid 101) after 2.5 s\n")
    assert why in told
    assert told.endswith("\nrank 0 had finished without an error\n")
    others = ("memory", "scheduler", "Gloo", "debugger", "os._exit")
    assert [each for each in others if each in told] == [e for e in others if e in why]


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_ranks_that_all_left_are_no_failure(name):
    """The signal is named, and who was the first, in one line."""
    status = 128 + signal.Signals[name]
    left = [failure(r, status, error=f"SystemExit: {status}") for r in (2, 0)]
    told = Ended(left, [0, 1, 2], 1.0).report
    assert told == f"all ranks exited because of {name}, rank 2 first."


def test_ranks_after_the_first_are_told_in_a_line_each():
    """By rank: what each raised, that it was ended, or how it ended; and no trace twice."""
    trace = 'Traceback:\n  File "train.py", line 3, in run\nValueError: boom'
    other = trace.replace("line 3", "line 4")
    told = Ended(
        [
            failure(3, 1, error="ValueError: boom\nmore", traceback=trace),
            failure(4, -signal.SIGTERM),
            failure(2, 7),
            failure(1, 1, error="ValueError: boom", traceback=trace),
            failure(0, 1, error="ValueError: boom", traceback=other),
        ],
        range(6),
        1.0,
    ).report
    assert told.splitlines() == [
        "rank 3 failed first (exit code 1, pid 103) after 5.0 s",
        *trace.splitlines(),
        "rank 0 followed: ValueError: boom",
        *other.splitlines(),
        "rank 1 followed: ValueError: boom",
        "rank 2 followed: exit code 7",
        "rank 4 was ended by SIGTERM",
        "rank 5 had finished without an error",
    ]


def test_whose_trace_is_shown_beside_a_lost_peer():
    """A rank that merely lost another shows none, unless the first had lost one, too."""
    lost = 'Traceback:\n  File "a.py", line 1, in run\nPeerFailedError: rank 1'
    boom = 'Traceback:\n  File "b.py", line 2, in run\nValueError: boom'
    for first, is_shown in ((boom, False), (lost.replace("a.py", "c.py"), True)):
        told = Ended(
            [
                failure(1, 1, error="first", traceback=first),
                failure(0, 1, error="second", traceback=lost),
            ],
            [0, 1],
            0.0,
        ).report
        assert (lost in told) == is_shown
        assert "rank 0 followed: second" in told
