# SPDX-License-Identifier: Apache-2.0
"""`hunt`: insert a bug and run its test; does the test fail, and after how many examples?"""

import functools
import inspect
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import attrs
import pytest

import accelfn as af
from tests.budget import budgeted
from tests.mutants.mutant import Mutant, planted

FOUND = (AssertionError, af.errors.Error, pytest.fail.Exception)
"""The exceptions of a test that found a bug. Any other exception is a crash from the bug."""
_MOST_SECONDS = 300
"""After these seconds, a test is ended: with a bug, it may run forever."""


@attrs.frozen
class Outcome:
    """The result of running a mutant's test.

    Attributes:
        mutant: the bug.
        killed: whether the test found the bug, with at least one of its failures.
        told: the error of the test; "" if it did not fail.
        examples: the number of examples that the test ran.
        seconds: how long the test ran.
    """

    mutant: Mutant
    killed: bool
    told: str
    examples: int
    seconds: float


def hunt(mutant: Mutant) -> Outcome:
    """Insert a bug and run its test, in a forked process, which the bug may damage."""
    _ = mutant.code(), mutant.args  # raises here if the bug does not fit the code
    ours, theirs = Pipe(duplex=False)
    process = os.fork()
    if process == 0:
        try:
            theirs.send(_hunted(mutant))
        finally:
            os._exit(0)
    theirs.close()
    start = time.perf_counter()
    found = {"killed": False, "told": "its process ended", "examples": 0}
    try:
        if ours.poll(_MOST_SECONDS):
            found = ours.recv()
        else:
            os.kill(process, signal.SIGKILL)
    except EOFError:
        pass
    os.waitpid(process, 0)
    found.setdefault("seconds", time.perf_counter() - start)
    return Outcome(mutant, **found)


def _hunted(mutant: Mutant) -> dict[str, Any]:
    """Run a mutant's test in this process; return the fields of its `Outcome`."""
    error: BaseException | None = None
    budgeted(mutant.test)
    start = time.perf_counter()
    with (
        lent(mutant.test) as fixtures,
        planted(mutant),
        _counting(mutant.test) as examples,
    ):
        try:
            mutant.test(**mutant.args, **fixtures)
        except (Exception, pytest.fail.Exception) as raised:  # noqa: BLE001 - checked below
            error = raised
    said = str(error or "").strip().partition("\n")[0]
    return {
        "killed": _is_found(error),
        "told": "" if error is None else f"{type(error).__name__} {said}".strip(),
        "examples": len(examples),
        "seconds": time.perf_counter() - start,
    }


def _is_found(error: BaseException | None) -> bool:
    if isinstance(error, ExceptionGroup):
        return error.subgroup(FOUND) is not None
    return isinstance(error, FOUND)


@contextmanager
def lent(test: Callable[..., None]) -> Iterator[dict[str, Any]]:
    """Yield the fixtures that a test needs: `tmp_path` and `monkeypatch`."""
    asked = inspect.signature(test).parameters
    with TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        there = {"tmp_path": Path(directory), "monkeypatch": patch}
        yield {name: each for name, each in there.items() if name in asked}


@contextmanager
def _counting(test: Callable[..., None]) -> Iterator[list[None]]:
    """Yield a list that gets one entry for each example that a test runs."""
    tried: list[None] = []
    handle = getattr(test, "hypothesis", None)
    if handle is None:  # a test without Hypothesis counts as one example
        yield [None]
        return
    inner = handle.inner_test

    @functools.wraps(inner)
    def counted(*args: Any, **kwargs: Any) -> Any:
        tried.append(None)
        return inner(*args, **kwargs)

    handle.inner_test = counted
    try:
        yield tried
    finally:
        handle.inner_test = inner
