# SPDX-License-Identifier: Apache-2.0
"""docs/mutants.md, out of what became of the mutants."""

from collections.abc import Sequence
from pathlib import Path

from tests.mutants.hunt import Outcome

PAGE = Path(__file__).parents[2] / "docs" / "mutants.md"

_HEAD = """\
# The mutants

A law whose test cannot fail proves nothing.
So for every [law](laws.md) there are bugs that it must find:
accelfn with a line changed, and one test of a law that fails on it.
What no law speaks of, as command lines and trackers, has bugs too, which other tests find.
`python -m nox -s mutants` plants them one by one, gives each test the examples that CI
gives it, prints this table and fails if a bug survives.
A bug is found where the test's own assertion fails, or accelfn refuses what the bug led to;
any other crash finds nothing.

A bug is a few lines in [`tests/mutants/`](../tests/mutants): a function, a part of its source,
and, after an arrow, what stands there instead.
A law of which no bug is here is refused by a test.
All {count} are found:

| what is wrong | planted in | law | found by | examples |
| --- | --- | --- | --- | --- |
"""


def page(outcomes: Sequence[Outcome]) -> str:
    """Return the page."""
    rows = [_row(each) for each in outcomes]
    return _HEAD.format(count=len(rows)) + "\n".join(rows) + "\n"


def _row(outcome: Outcome) -> str:
    mutant = outcome.mutant
    test = f"{mutant.test.__module__.rpartition('.')[2]}::{mutant.test.__name__}"
    cells = [
        mutant.says,
        f"`{mutant.where.removeprefix('accelfn.')}`",
        mutant.law or "",
        f"`{test}`",
        str(outcome.examples),
    ]
    return f"| {' | '.join(cells)} |"
