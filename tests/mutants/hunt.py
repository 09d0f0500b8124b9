# SPDX-License-Identifier: Apache-2.0
"""The hunt: does a test fail while a bug is planted, and after how many examples?"""

import functools
import inspect
import os
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
"""How a test says that it is broken; any other error is the bug's own, and kills nothing."""


@attrs.frozen
class Outcome:
    """What became of a mutant.

    Attributes:
        mutant: the bug.
        killed: whether the test found it, be it in one way of several.
        told: how the test failed, if it did.
        examples: that the test tried.
        seconds: that it took.
    """

    mutant: Mutant
    killed: bool
    told: str
    examples: int
    seconds: float


def hunt(mutant: Mutant) -> Outcome:
    """Plant a bug and run its test in a process of their own, which they may leave in a mess."""
    _ = mutant.code(), mutant.args  # or it says here that it cannot be planted
    ours, theirs = Pipe(duplex=False)
    process = os.fork()
    if process == 0:
        try:
            theirs.send(_hunted(mutant))
        finally:
            os._exit(0)
    theirs.close()
    try:
        found = ours.recv()
    except EOFError:
        found = {
            "killed": False,
            "told": "its process ended",
            "examples": 0,
            "seconds": 0.0,
        }
    os.waitpid(process, 0)
    return Outcome(mutant, **found)


def _hunted(mutant: Mutant) -> dict[str, Any]:
    """Return what became of a mutant in this process."""
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
        except (Exception, pytest.fail.Exception) as raised:  # noqa: BLE001 - it is judged
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
    """Lend a test what it asks pytest for: an empty directory, and what puts things back."""
    asked = inspect.signature(test).parameters
    with TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        there = {"tmp_path": Path(directory), "monkeypatch": patch}
        yield {name: each for name, each in there.items() if name in asked}


@contextmanager
def _counting(test: Callable[..., None]) -> Iterator[list[None]]:
    """Note every example that a test tries."""
    tried: list[None] = []
    handle = getattr(test, "hypothesis", None)
    if handle is None:  # a test without examples is one
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
