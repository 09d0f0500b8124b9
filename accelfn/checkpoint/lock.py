# SPDX-License-Identifier: Apache-2.0
"""One job writes to a directory of checkpoints: the lock that says which."""

import json
import os
import socket
import sys
import uuid
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self, cast

import attrs

from accelfn.base import paths
from accelfn.checkpoint import disk
from accelfn.errors import DirectoryInUseError

NAME = ".lock"
_LONGEST = 10_000
"""Bytes; some 200 are what a lock has."""


@attrs.frozen
class Lock:
    """What this process says in a lock's file when it holds it.

    Attributes:
        path: of the file.
        pid: of this process; one forked from it holds nothing.
        text: what is in the file.
    """

    path: Path
    pid: int
    text: str

    @classmethod
    def of(cls, directory: Path) -> Self:
        """Return a lock of a directory, not taken yet."""
        pid = os.getpid()
        mine = {
            "host": socket.gethostname(),
            "pid": pid,
            "begun": _begun(pid),
            "since": datetime.now(UTC).isoformat(timespec="seconds"),
            "token": uuid.uuid4().hex,  # of two locks of one process
        }
        return cls(directory / NAME, pid, json.dumps(mine))

    def take(self) -> None:
        """Take it, if it is not taken; a dead process's of this host is taken over.

        Raises:
            DirectoryInUseError: another process holds it, or one on another host did.
        """
        while (found := _text_of(self.path)) != self.text:
            if found is None:
                disk.claim(self.path, self.text)
                continue
            holder = _refuse_living(self.path, found)
            if disk.withdraw(self.path, found):
                sys.stderr.write(
                    f"accelfn: taking over {self.path} of {holder}, which is gone\n"
                )

    def release(self) -> None:
        """Let others take it, if it is this process's."""
        if self.pid == os.getpid():
            with suppress(OSError):
                disk.withdraw(self.path, self.text)


def _text_of(path: Path) -> str | None:
    """Return what is in a lock's file, or nothing of what no lock says."""
    try:
        with disk.open_plain(path) as file:
            text = file.read(_LONGEST + 1).decode()
    except FileNotFoundError:
        return None
    except UnicodeDecodeError:
        return ""
    return text if len(text) <= _LONGEST else ""


def _refuse_living(path: Path, text: str) -> str:
    """Return which process held a lock, which was one of this host and is dead.

    Raises:
        DirectoryInUseError: that is not so, or nobody can tell, for the text is cut off.
    """
    try:
        holder = cast("dict[str, Any]", json.loads(text))
        host, pid, since = holder["host"], int(holder["pid"]), holder["since"]
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        host, pid, since, holder = "an unknown host", 0, "an unknown time", {}
    if host == socket.gethostname() and _begun(pid) != holder.get("begun"):
        return f"process {pid} of this host (since {since})"
    msg = (
        f"{path.parent} is in use: a job writes its checkpoints there, held by {host}:{pid}"
        f" since {since}. Give each job a directory of its own; if that one is gone, remove"
        f" {path}."
    )
    raise DirectoryInUseError(msg)


def _begun(pid: int) -> str | None:
    """Return when a process of this host began, in a unit of the system's; None: it is dead.

    A process number is given again in time; number and beginning together are not.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        pass
    else:
        state, *rest = stat.rpartition(")")[2].split()
        return None if state == "Z" else rest[18]
    if paths.exists(Path("/proc/self/stat")):
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except OSError:
        return "another user's"
    return "alive"
