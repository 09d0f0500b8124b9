# SPDX-License-Identifier: Apache-2.0
"""The number of Hypothesis examples that CI runs for each property test.

`budget.txt` lists tests and their numbers; any other property test uses the number of its
Hypothesis profile. If one example takes a tenth of a second or more, CI runs a quarter more
examples than the test's mutants needed, and at least 20. Slow tests run fewer: 9 to 14 if the test
takes seconds, 4 to 8 if one example takes most of a second. Tests with cheap examples and rare bugs
run more. `nox -s mutants` uses the same numbers, and `nox -s laws` runs 2,000 examples for every
test.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import settings

_FILE = Path(__file__).with_suffix(".txt")
NUMBERS = {
    name: int(number)
    for name, _, number in (
        line.rpartition(": ") for line in _FILE.read_text().splitlines()
    )
}
"""By module and name of the test."""


def at_night() -> bool:
    """Whether there is time for what CI takes samples of: `nox -s laws` has it."""
    return settings.default.max_examples > settings.get_profile("ci").max_examples


def budgeted(test: Callable[..., Any]) -> None:
    """Give a test its number of examples, where those of the profile are CI's.

    Settings are bound where a test is decorated, so this is said to the test itself.
    """
    name = f"{test.__module__.removeprefix('tests.')}::{test.__name__}"
    ci = settings.get_profile("ci").max_examples
    already = hasattr(test, "_hypothesis_internal_settings_applied")
    if name in NUMBERS and settings.default.max_examples == ci and not already:
        settings(settings.default, max_examples=NUMBERS[name])(test)
