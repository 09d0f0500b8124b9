# SPDX-License-Identifier: Apache-2.0
"""The hunt: does a test fail while a bug is planted, and after how many examples?"""

import functools
import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import attrs
import pytest

import accelfn as af
from tests.budget import budgeted
from tests.mutants.mutant import Mutant, planted

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
