# SPDX-License-Identifier: Apache-2.0
"""`Watch`: which ranks of a machine have failed, and what is known of those that have not."""

from __future__ import annotations

import math
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

from accelfn.base import paths
from accelfn.launching.worker import ASKS_WHERE, LEADS, where_file

if TYPE_CHECKING:
    from collections.abc import Mapping

_GRACE_SECONDS = 1.0
"""Ranks that lost one of them have time to say so, before the launcher ends them."""
_ANSWER_SECONDS = 0.5


class Watch:
    """The processes of one attempt, by local rank.

    Attributes:
        pids: which they are.
        failed_at: which have failed by themselves, and when; in seconds since the epoch.
        stopped: which were stopped, by a signal that halts a process and does not end it.
        stacks: where those are that neither failed nor were stopped, most recent call first.
    """

    def __init__(self, pids: Mapping[int, int], error_files: Mapping[int, str]) -> None:
        """Take the processes, and where each was told to record its error."""
        self.pids, self._error_files = dict(pids), dict(error_files)
        self.failed_at: dict[int, float] = {}
        self.stopped: set[int] = set()
        self.stacks: dict[int, str] = {}

    def may_end(self) -> bool:
        """Look who has failed; return whether torch's agent may look too, and end the others.

        Not until one has failed, nor while others may follow it; unless none is left to end.
        """
        running = self._running()
        for local in self.pids.keys() - running:
            if _status(self.pids[local]):
                self.failed_at.setdefault(local, time.time())
        if not running:
            return True
        first = min(self.failed_at.values(), default=math.inf)
        return time.time() - first > _GRACE_SECONDS

    def question(self) -> None:
        """Find out about those that go on where others have failed.

        One that was stopped is sent on to its end: the signal that is to end it would wait
        with it until it continues.
        """
        running = self._running() if self.failed_at else set[int]()
        self.stopped = {local for local in running if _is_stopped(self.pids[local])}
        for local in self.stopped:
            os.kill(self.pids[local], signal.SIGTERM)
            os.kill(self.pids[local], signal.SIGCONT)
        files = {
            local: Path(where_file(self._error_files[local]))
            for local in running - self.stopped
        }
        # one that has not made its file knows nothing of the signal, which would kill it
        asked = {local: file for local, file in files.items() if paths.exists(file)}
        for local in asked:
            os.kill(self.pids[local], ASKS_WHERE)
        self.stacks = self._answers(asked)

    def _answers(self, files: Mapping[int, Path]) -> dict[int, str]:
        until = time.monotonic() + _ANSWER_SECONDS
        found: dict[int, str] = {}
        while len(found) < len(files) and time.monotonic() < until:
            time.sleep(0.02)
            texts = {local: _read(file) for local, file in files.items()}
            found = {local: text for local, text in texts.items() if _is_whole(text)}
        return {local: _users(text) for local, text in found.items()}

    def _running(self) -> set[int]:
        return {local for local, pid in self.pids.items() if _status(pid) is None}


def _status(pid: int) -> int | None:
    """Return how a child ended; None while it runs. It stays to be waited for."""
    options = os.WEXITED | os.WNOHANG | os.WNOWAIT
    try:
        found = os.waitid(os.P_PID, pid, options)
    except ChildProcessError:  # it was waited for, and had not failed
        return 0
    return None if found is None else found.si_status


def _is_stopped(pid: int) -> bool:
    try:
        status = Path("/proc", str(pid), "stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] == "T"


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _is_whole(stack: str) -> bool:
    """Whether a stack has been written to its end, or to where Python cuts a deep one."""
    return stack.endswith(("in <module>\n", "  ...\n"))


def _users(stack: str) -> str:
    """Return a stack without the frames that lead to the user's script."""
    _, *frames = stack.splitlines()
    leads = tuple(f'  File "{each}' for each in (*LEADS, "<frozen "))
    return "\n".join(frame for frame in frames if not frame.startswith(leads))
