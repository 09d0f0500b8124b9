# SPDX-License-Identifier: Apache-2.0
"""The hunt: does a test fail while a bug is planted, and after how many examples?"""

import functools
import inspect
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import attrs
import pytest

import accelfn as af
from accelfn.base import accelerator
from tests.budget import budgeted
from tests.mutants.mutant import Mutant, planted

_ON_A_DEVICE = "tests.accelerator"
FOUND = (AssertionError, af.Error, pytest.fail.Exception)
"""How a test says that it is broken; any other error is the bug's own, and kills nothing."""


@attrs.frozen
class Outcome:
    """What became of a mutant.

    Attributes:
        mutant: the bug.
        by: the error with which the test failed, or None: the mutant survived.
        examples: that the test tried.
        seconds: that it took.
    """

    mutant: Mutant
    by: BaseException | None
    examples: int
    seconds: float

    @property
    def killed(self) -> bool:
        """Whether the test found the bug, be it in one way of several."""
        if isinstance(self.by, ExceptionGroup):
            return self.by.subgroup(FOUND) is not None
        return isinstance(self.by, FOUND)

    @property
    def told(self) -> str:
        """How the test failed, if it did."""
        said = str(self.by or "").strip().partition("\n")[0]
        return "" if self.by is None else f"{type(self.by).__name__} {said}".strip()


def hunt(mutant: Mutant) -> Outcome:
    """Plant a bug, run its test, and take it out again."""
    if _ON_A_DEVICE in mutant.test.__module__ and accelerator.kind() == "cpu":
        return _hunted_there(mutant)
    found: BaseException | None = None
    budgeted(mutant.test)
    start = time.perf_counter()
    with (
        lent(mutant.test) as fixtures,
        planted(mutant),
        _counting(mutant.test) as examples,
    ):
        try:
            mutant.test(**mutant.args, **fixtures)
        except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001 - it is judged
            found = error
    return Outcome(mutant, found, len(examples), time.perf_counter() - start)


def _hunted_there(mutant: Mutant) -> Outcome:
    """Hunt in another process, which has the fake accelerator."""
    command = [sys.executable, "-m", f"{_ON_A_DEVICE}.hunt", mutant.says]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    told = json.loads(done.stdout.splitlines()[-1])
    kind = AssertionError if told["killed"] else RuntimeError
    by = kind(told["told"]) if told["told"] else None
    return Outcome(mutant, by, told["examples"], told["seconds"])


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
