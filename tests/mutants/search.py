# SPDX-License-Identifier: Apache-2.0
"""Search: does any test of the suite find bugs that are not in the table?

All fast tests run once, to record which tests call the functions with bugs. Then the tests of each
function run with its bug inserted. Tests that call the fewest of the functions run first.
"""

import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import attrs
import pytest

from tests.mutants.operators import possible_changes
from tests.mutants.places import all_places
from tests.mutants.plugin import BUG, PLACES

_MOST_TESTS = 200
_SECONDS = 300
_PARALLEL = "3"
_PYTEST = (
    *(sys.executable, "-m", "pytest", "-q", "-p", "tests.mutants.plugin"),
    *("-p", "no:cacheprovider", "-m", "not slow", "--hypothesis-profile=ci"),
    "--ignore=tests/ranks",  # these tests call the functions in other processes
)


@attrs.frozen
class Bug:
    """A bug that a test may find.

    Attributes:
        place: the qualified name of the function that has the bug; see `places`.
        change: the change of the function, as `old → new`; see `change`.
        says: a sentence about the wrong behavior.
    """

    place: str
    change: str
    says: str = ""


def read_bugs(path: Path) -> list[Bug]:
    """Read bugs from a file. Each line has place, change and sentence, separated by tabs."""
    return [Bug(*line.split("\t")) for line in path.read_text().splitlines() if line]


def draw_bugs(count: int, seed: int, folder: str) -> list[Bug]:
    """Draw random bugs in the functions of a folder; see `operators`."""
    places = [p for p in all_places() if f"accelfn.{folder}" in p.module]
    choose = random.Random(seed)  # noqa: S311 - not for cryptography
    bugs: list[Bug] = []
    while len(bugs) < count:
        place = choose.choice(places)
        if changes := list(possible_changes(place)):
            name = f"{place.module.removeprefix('accelfn.')}:{place.name}"
            bugs.append(Bug(name, choose.choice(changes)))
    return bugs


def search(bugs: Sequence[Bug]) -> Iterator[tuple[Bug, str]]:
    """Yield each bug with the test that found it; "" if no test did."""
    reaching = _tests_by_place({each.place for each in bugs})
    reach = Counter(test for tests in reaching.values() for test in tests)

    def find(bug: Bug) -> tuple[Bug, str]:
        tests = sorted(reaching.get(bug.place, []), key=lambda test: reach[test])
        return bug, _first_failure(bug, tests[:_MOST_TESTS])

    with ThreadPoolExecutor(int(_PARALLEL)) as pool:
        yield from pool.map(find, bugs)


def _tests_by_place(places: set[str]) -> dict[str, list[str]]:
    """Run the fast tests; return, for each function, the tests that call it."""
    with TemporaryDirectory() as directory:
        watched = json.dumps([sorted(places), directory])
        side_by_side = "-n", _PARALLEL, "--dist", "loadgroup"
        subprocess.run(
            [*_PYTEST, *side_by_side, "tests"],
            env=os.environ | {PLACES: watched},
            check=False,
            stdout=sys.stderr,
        )
        found: dict[str, list[str]] = {}
        for path in Path(directory).iterdir():
            for place, tests in json.loads(path.read_text()).items():
                found.setdefault(place, []).extend(tests)
    return found


def _first_failure(bug: Bug, tests: Sequence[str]) -> str:
    """Run tests with a bug inserted; return the first test that fails, or ""."""
    if not tests:
        return ""
    planted = os.environ | {BUG: json.dumps([bug.place, bug.change])}
    try:
        done = subprocess.run(
            [*_PYTEST, "-x", "--tb=no", *tests],
            env=planted,
            check=False,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return f"a test that takes longer than {_SECONDS} s: try the bug by itself"
    if done.returncode == pytest.ExitCode.USAGE_ERROR:  # pytest rejected an id
        files = dict.fromkeys(test.partition("::")[0] for test in tests)
        return _first_failure(bug, [*files]) if [*files] != [*tests] else ""
    if done.returncode == 0:
        return ""
    lines = done.stdout.splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return failed[0] if failed else f"a process that ended with {done.returncode}"
