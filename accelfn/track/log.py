# SPDX-License-Identifier: Apache-2.0
"""`read`: what a run's jsonl says in the end, where it went back and began anew too."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import attrs

from accelfn.base.calling import called
from accelfn.errors import TrackingError
from accelfn.track.jsonl import FORMAT
from accelfn.track.values import MOST_STEPS

_LATEST = 1e11
"""Seconds since 1970: a clock that says more, or as much before, is none."""
_SHOWN = 200
"""Letters of a line that an error shows."""


@attrs.frozen
class Log:
    """A run, as its jsonl tells it.

    Attributes:
        path: of the file.
        hyperparameters: nested, the last that were tracked under each name.
        metrics: by name, then by step, in order; of a name that a step has twice, the last.
        times: of each step, in seconds since 1970: when it was last tracked.
        resumed: the last step before each time that a tracker opened the file again.
        superseded: records that count no more, for the run went back before them.
        unfinished: the last line has no end; it is being written, or never was.
    """

    path: Path
    hyperparameters: dict[str, Any]
    metrics: dict[str, dict[int, float]]
    times: dict[int, float]
    resumed: tuple[int, ...]
    superseded: int
    unfinished: bool


@called
def read(path: str | Path) -> Log:
    """Read what `af.track.jsonl` wrote, while it is being written too.

    Raises:
        TrackingError: there is no such file, or a line is not one of a tracker.

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
    for number, record in _records(path, lines):
        try:
            story.hear(record)
        except (TypeError, ValueError, KeyError, OverflowError):
            raise _foreign(path, number, record) from None
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
    """What counts, after each record; `kept` is in the order of its steps."""

    def __init__(self) -> None:
        self.kept: list[tuple[int, float, dict[str, float]]] = []
        self.hyperparameters: dict[str, Any] = {}
        self.resumed: list[int] = []
        self.superseded = 0
        self._began = False
        self._unheard = 0  # how many of the last openings no record has followed

    def hear(self, record: dict[str, Any]) -> None:
        if "hyperparameters" in record:
            self.hyperparameters.update(record["hyperparameters"])
        elif "began" in record:
            if "step" in record:
                self._back_to(_step(record))
            if self._began:
                self.resumed.append(self._last())
                self._unheard += 1
            self._began = True
        else:
            step, time, given = _step(record), _time(record), record["metrics"]
            if not isinstance(given, dict):
                raise TypeError
            told = cast("dict[str, Any]", given)
            numbers = {name: float(value) for name, value in told.items()}
            if self.kept and step < self.kept[-1][0]:
                self._back_to(step - 1)
            self.kept.append((step, time, numbers))
            self._unheard = 0

    def _back_to(self, step: int) -> None:
        while self.kept and self.kept[-1][0] > step:
            self.kept.pop()
            self.superseded += 1
        heard = len(self.resumed) - self._unheard
        before = [each for each in self.resumed[:heard] if each <= step]
        # who opened the file and then goes back resumes from there
        opened = [min(each, self._last()) for each in self.resumed[heard:]]
        self.resumed = before + opened

    def _last(self) -> int:
        return self.kept[-1][0] if self.kept else 0


def _step(record: dict[str, Any]) -> int:
    step = record["step"]
    if type(step) is not int:
        raise TypeError
    if abs(step) >= MOST_STEPS:
        raise ValueError
    return step


def _time(record: dict[str, Any]) -> float:
    time = float(record["time"])
    if not abs(time) < _LATEST:  # nor is it NaN
        raise ValueError
    return time


def _foreign(path: Path, number: int, record: object) -> TrackingError:
    shown = repr(record)
    if len(shown) > _SHOWN:
        shown = f"{shown[:_SHOWN]}…"
    return TrackingError(
        f"{path}, line {number} is not what af.track.jsonl writes: {shown}."
    )


def _records(path: Path, lines: list[bytes]) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            msg = f"{path}, line {number} is no JSON: {error}."
            raise TrackingError(msg) from error
        if not isinstance(record, dict):
            raise _foreign(path, number, cast("object", record))
        told = cast("dict[str, Any]", record)
        if told.get("accelfn", FORMAT) != FORMAT:
            msg = f"{path} is of format {told['accelfn']}; this accelfn reads {FORMAT}."
            raise TrackingError(msg)
        yield number, told
