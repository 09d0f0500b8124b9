# SPDX-License-Identifier: Apache-2.0
"""What the launcher makes of how ranks ended."""

import signal

import pytest

from accelfn.launching.failures import Failure, all_left_on_signal

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
