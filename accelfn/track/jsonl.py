# SPDX-License-Identifier: Apache-2.0
"""`jsonl`: a run's numbers in a text file, a line a record, readable while it grows.

A line is appended by one write, and cut off again if the disk took only a part of it, so it
is whole or absent. Nothing that was written is ever changed: a run that goes back to an
earlier step says so by the order of its lines, which `af.track.read` heeds.
"""

import errno
import fcntl
import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from accelfn.base.calling import called
from accelfn.errors import ArgumentError, TrackingError
from accelfn.track.tracker import Tracker, open_tracker
from accelfn.track.values import Pixels, Plain, check_step, spelt
from accelfn.world import World

FORMAT = 1
_BLOCK = 65536


class _Jsonl:
    def __init__(self, path: Path, step: int | None) -> None:
        self.backend = path
        path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._handle = os.open(path, flags, 0o644)
        try:
            self._own()
            os.ftruncate(self._handle, _whole(self._handle))
            begins = {"accelfn": FORMAT, "began": time.time()}
            self._append(begins if step is None else {**begins, "step": step})
        except BaseException:
            os.close(self._handle)
            raise

    def _own(self) -> None:
        """Keep other jobs from writing to the file, where the file system can."""
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            msg = (
                f"af.track.jsonl: another tracker writes to {self.backend}; close it, or"
                " give each run a file of its own."
            )
            raise TrackingError(msg) from None
        except OSError:  # a file system without locks
            pass

    def metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self._append(
            {"step": step, "time": time.time(), "metrics": spelt(dict(metrics))}
        )

    def hyperparameters(self, hyperparameters: Mapping[str, Plain]) -> None:
        told = spelt(dict(hyperparameters))
        self._append({"hyperparameters": told, "time": time.time()})

    def images(self, images: Mapping[str, Pixels], step: int) -> None:
        raise NotImplementedError

    def _append(self, record: Mapping[str, Any]) -> None:
        line = json.dumps(record, allow_nan=False).encode() + b"\n"
        end = os.fstat(self._handle).st_size
        number = errno.ENOSPC  # what a part of a line that was taken means
        try:
            if os.write(self._handle, line) == len(line):
                return
        except OSError as error:
            number = error.errno or errno.EIO
        with suppress(OSError):  # the next one who opens the file cuts it off
            os.ftruncate(self._handle, end)
        raise OSError(number, os.strerror(number), str(self.backend))

    def close(self, *, failed: bool) -> None:
        try:
            os.fsync(self._handle)
        finally:
            os.close(self._handle)


def _whole(handle: int) -> int:
    """Return how many bytes there are up to the end of the last whole line."""
    end = os.fstat(handle).st_size
    while end:
        start = max(0, end - _BLOCK)
        found = os.pread(handle, end - start, start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0


@called
def jsonl(path: str | Path, *, world: World, step: int | None = None) -> Tracker:
    """Return a tracker that appends to a text file, a line of JSON a record.

    The file and its folder are made; one that is there is gone on with. Each record is with
    the operating system when the call returns, so a process that is killed loses none, and
    on the disk when the tracker is closed. `af.track.read` reads it.

    A record whose step is lower than that of the record before it says that the run went
    back, by a resume or a rollback: what was written of that step and later ones stays in
    the file, and counts no more. JSON has no numbers for what is not finite: those are the
    texts "NaN", "Infinity" and "-Infinity".

    Args:
        path: of the file; by convention it ends in `.jsonl`.
        world: that of the run; rank 0 writes.
        step: for a run that was loaded: `state.step`. What the file has of later steps counts
            no more, also where the run's next record would be of a later step than those.

    Raises:
        TrackingError: the file cannot be written, or another tracker writes to it.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     with jsonl(f"{folder}/run.jsonl", world=World.single()) as tracker:
        ...         tracker({"loss": 0.5}, 1)
        ...     print(Path(folder, "run.jsonl").read_text().splitlines()[1])
        {"step": 1, "time": ..., "metrics": {"loss": 0.5}}
    """
    if step is not None:
        check_step(step)
    if not isinstance(path, (str, Path)):
        msg = f"af.track.jsonl({path!r}): expected the path of a file."
        raise ArgumentError(msg)
    return open_tracker("jsonl", lambda: _Jsonl(Path(path), step), world=world)
