# SPDX-License-Identifier: Apache-2.0
"""`jsonl`: track a run in a text file with one JSON record per line.

You can read the file while the run writes to it. Each line is appended by one write. If the disk
is full after a part of the line, that part is removed, so the file contains only complete lines.
Written lines never change. If a run goes back to an earlier step, later lines have lower steps,
and `af.track.read` drops the older records.
"""

import errno
import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs

from accelfn import World
from accelfn.errors import TrackingError
from accelfn.plug import arguments, system
from accelfn.track.tracker import (
    MOST_STEPS,
    Pixels,
    Plain,
    Tracker,
    check_step,
    custom,
    spelt,
)

FORMAT = 1


class _Jsonl:
    def __init__(self, path: Path, step: int | None) -> None:
        self.backend = path
        path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | system.AS_BYTES
        self._handle = os.open(path, flags, 0o644)
        try:
            self._lock()
            data = path.read_bytes() if os.fstat(self._handle).st_size else b""
            os.ftruncate(self._handle, data.rfind(b"\n") + 1)  # keep complete lines
            begins = {"accelfn": FORMAT, "began": time.time()}
            self._append(begins if step is None else {**begins, "step": step})
        except BaseException:
            os.close(self._handle)
            raise

    def _lock(self) -> None:
        """Lock the file, if the file system supports locks, so that no other tracker writes."""
        try:
            system.lock(self._handle)
        except BlockingIOError:
            msg = (
                f"af.track.jsonl: another tracker writes to {self.backend}. Close that tracker,"
                " or use a separate file for each run."
            )
            raise TrackingError(msg) from None
        except OSError:  # the file system does not support locks
            pass

    def metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self._append({"step": step, "time": time.time(), "metrics": dict(metrics)})

    def hyperparameters(self, hyperparameters: Mapping[str, Plain]) -> None:
        table = dict(hyperparameters)
        self._append({"hyperparameters": table, "time": time.time()})

    def images(self, images: Mapping[str, Pixels], step: int) -> None:
        raise NotImplementedError

    def _append(self, record: dict[str, Any]) -> None:
        line = json.dumps(spelt(record), allow_nan=False).encode() + b"\n"
        end = os.fstat(self._handle).st_size
        number = errno.ENOSPC  # the disk is full if only a part of the line is written
        try:
            if os.write(self._handle, line) == len(line):
                return
        except OSError as error:
            number = error.errno or errno.EIO
        with suppress(OSError):  # if this fails, the next tracker removes the line
            os.ftruncate(self._handle, end)
        raise OSError(number, os.strerror(number), str(self.backend))

    def close(self, *, failed: bool) -> None:
        try:
            os.fsync(self._handle)
        finally:
            os.close(self._handle)


@arguments.explain_call_errors
def jsonl(path: str | Path, *, world: World, step: int | None = None) -> Tracker:
    """Create a tracker that appends records to a text file, one line of JSON per record.

    The file and its folder are created if they do not exist. When a call of the tracker returns,
    the operating system has the record, so you do not lose the record if the process is killed.
    The records are on the disk when you close the tracker. Read the file with `af.track.read`.

    If a record has a lower step than the record before, the run went back to an earlier step.
    Older records of that step and of later steps stay in the file, but `af.track.read` drops them.
    JSON has no NaN and no infinite numbers, so they are written as "NaN", "Infinity" and
    "-Infinity".

    Args:
        path: the file; by convention its name ends in `.jsonl`.
        world: the run's world; rank 0 writes.
        step: pass `state.step` if you loaded the state from a checkpoint. `af.track.read` then
            drops older records of later steps, even if the run never tracks these steps again.

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
    file = arguments.as_path(f"af.track.jsonl({path!r})", path, "a file")
    return custom(lambda: _Jsonl(file, step), name="jsonl", world=world)


# `read`: read a run's file, without the records that the run has replaced.


_LATEST = 1e11
"""The largest valid time: seconds after (or before) 1970."""


@attrs.frozen
class Log:
    """A run that `af.track.read` read from a file.

    Attributes:
        path: the file.
        hyperparameters: the last tracked value of each hyperparameter; can be nested.
        metrics: for each name, a dict from step to value, sorted by step. If the file has
            several values for a step, the dict has the last one.
        times: the time of each step's last record, in seconds since 1970.
        resumed: for each time that a tracker opened the file again, the last step that the file
            had before.
        superseded: the number of records that were dropped, because the run was resumed from an
            earlier step and wrote records of these steps again.
        unfinished: whether the last line is incomplete, because it is being written, or because
            its writing was interrupted.
    """

    path: Path
    hyperparameters: dict[str, Any]
    metrics: dict[str, dict[int, float]]
    times: dict[int, float]
    resumed: tuple[int, ...]
    superseded: int
    unfinished: bool


def read(path: str | Path) -> Log:
    """Read a file that `af.track.jsonl` wrote; this also works while the run is writing.

    Raises:
        TrackingError: the file cannot be read, or a line is not a record of `af.track.jsonl`.

    Example:
        >>> read("no.jsonl")
        Traceback (most recent call last):
            ...
        accelfn.errors.TrackingError: no.jsonl cannot be read: No such file or directory.
    """
    path = Path(path)
    try:
        *lines, rest = path.read_bytes().split(b"\n")
    except OSError as error:
        msg = f"{path} cannot be read: {error.strerror}."
        raise TrackingError(msg) from error
    story = _Story()
    for number, line in enumerate(lines, start=1):
        try:
            record: Any = json.loads(line)
        except (ValueError, RecursionError) as error:
            msg = f"{path}, line {number} is not valid JSON: {error}."
            raise TrackingError(msg) from error
        try:
            version = record.get("accelfn", FORMAT)
            if version == FORMAT:
                story.hear(record)
        except (AttributeError, TypeError, ValueError, KeyError, OverflowError):
            text = f"is not a record of af.track.jsonl: {record!r:.200}"
            msg = f"{path}, line {number} {text}."
            raise TrackingError(msg) from None
        if version != FORMAT:
            msg = (
                f"{path} has format {version}, but this version of accelfn reads only"
                f" format {FORMAT}. Use the version that wrote the file."
            )
            raise TrackingError(msg)
    story.note_resumed()
    metrics = dict[str, dict[int, float]]()
    for step, _, numbers in story.kept:
        for name, value in numbers.items():
            metrics.setdefault(name, {})[step] = value
    return Log(
        path=path,
        hyperparameters=story.hyperparameters,
        metrics=metrics,
        times={step: time for step, time, _ in story.kept},
        resumed=tuple(story.resumed),
        superseded=story.superseded,
        unfinished=bool(rest),
    )


class _Story:
    """The records that are still valid after the lines read so far; `kept` is sorted by step."""

    def __init__(self) -> None:
        self.kept: list[tuple[int, float, dict[str, float]]] = []
        self.hyperparameters: dict[str, Any] = {}
        self.resumed: list[int] = []
        self.superseded = 0
        self._began = False
        # how often the file was opened again since the last record
        self._num_opened = 0

    def hear(self, record: dict[str, Any]) -> None:
        if "hyperparameters" in record:
            self.hyperparameters.update(record["hyperparameters"])
        elif "began" in record:
            if "step" in record:
                self._go_back(_step(record))
            self._num_opened += self._began
            self._began = True
        else:
            step, time = _step(record), float(record["time"])
            if not abs(time) < _LATEST:  # also True for NaN
                raise ValueError
            numbers = {name: float(value) for name, value in record["metrics"].items()}
            if self.kept and step < self.kept[-1][0]:
                self._go_back(step - 1)
            self.note_resumed()
            self.kept.append((step, time, numbers))

    def _go_back(self, step: int) -> None:
        while self.kept and self.kept[-1][0] > step:
            self.kept.pop()
            self.superseded += 1
        self.resumed = [at for at in self.resumed if at <= step]

    def note_resumed(self) -> None:
        """Store the last step for each tracker that opened the file since the last record."""
        last = self.kept[-1][0] if self.kept else 0
        self.resumed += [last] * self._num_opened
        self._num_opened = 0


def _step(record: dict[str, Any]) -> int:
    step = record["step"]
    if not arguments.is_integer(step) or abs(step) >= MOST_STEPS:
        raise ValueError
    return step
