# SPDX-License-Identifier: Apache-2.0
"""The hunt: does a law's test fail while a bug is planted, and after how many examples?"""

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import pytest

import accelfn as af
from tests.budget import budgeted
from tests.mutants.mutant import Mutant, planted

FOUND = (AssertionError, af.Error, pytest.fail.Exception)
"""How a law says that it is broken; any other error is the bug's own, and kills nothing."""


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
        """Whether the law found the bug, be it in one way of several."""
        if isinstance(self.by, ExceptionGroup):
            return self.by.subgroup(FOUND) is not None
        return isinstance(self.by, FOUND)

    @property
    def told(self) -> str:
        """How the test failed, if it did."""
        said = str(self.by or "").strip().partition("\n")[0]
        return "" if self.by is None else f"{type(self.by).__name__} {said}".strip()


def hunt(mutant: Mutant) -> Outcome:
    """Plant a bug, hold its law against accelfn, and take it out again."""
    found: BaseException | None = None
    budgeted(mutant.test)
    start = time.perf_counter()
    with planted(mutant), _counting(mutant.test) as examples:
        try:
            mutant.test(**mutant.args)
        except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001 - it is judged
            found = error
    return Outcome(mutant, found, len(examples), time.perf_counter() - start)


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
