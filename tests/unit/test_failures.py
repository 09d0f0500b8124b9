# SPDX-License-Identifier: Apache-2.0
"""What the launcher makes of how ranks ended."""

import signal
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelfn.launching.failures import Failure, all_left_on_signal, by_cause

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
    assert all_left_on_signal(failures) == all_left


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
def test_who_left_because_it_was_asked_to_is_not_to_blame(
    ranks: list[int], later: float
) -> None:
    """One lost a rank that hangs, and the launcher ended the others: the one that hangs comes
    first, whenever a third one left on the launcher's signal.
    """
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
