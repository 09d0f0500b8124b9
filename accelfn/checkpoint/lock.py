# SPDX-License-Identifier: Apache-2.0
"""One job writes to a directory of checkpoints: the lock that says which."""

import json
import os
import socket
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self, cast

import attrs

from accelfn.checkpoint import disk
from accelfn.errors import DirectoryInUseError

NAME = ".lock"


@attrs.frozen
class Lock:
    """A lock that this process holds.

    Attributes:
        path: of its file.
        text: what is in it.
    """

    path: Path
    text: str

    @classmethod
    def take(cls, directory: Path) -> Self:
        """Take the lock of a directory; a dead process's of this host is taken over.

        Raises:
            DirectoryInUseError: another process holds it, or one on another host did.
        """
        mine = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "begun": _begun(os.getpid()),
            "since": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        lock = cls(directory / NAME, json.dumps(mine))
        for _ in range(2):
            try:
                disk.write(lock.path, [lock.text.encode()])
            except FileExistsError:
                _refuse_living(lock.path)
                lock.path.unlink(missing_ok=True)
            else:
                return lock
        return cls.take(directory)

    def release(self) -> None:
        """Let others take it, if it is still this process's."""
        try:
            if self.path.read_text() == self.text:
                self.path.unlink()
        except OSError:
            return


def _refuse_living(path: Path) -> None:
    """Raise unless the lock's process was on this host, and is dead."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return
    try:
        holder = cast("dict[str, Any]", json.loads(text))
        host, pid, since = holder["host"], int(holder["pid"]), holder["since"]
    except (ValueError, KeyError, TypeError):  # cut off as it was written
        host, pid, since, holder = "an unknown host", 0, "an unknown time", {}
    dead = host == socket.gethostname() and _begun(pid) != holder.get("begun")
    if dead:
        return
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
    if Path("/proc/self/stat").exists():
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except OSError:
        return "another user's"
    return "alive"
