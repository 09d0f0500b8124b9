# SPDX-License-Identifier: Apache-2.0
"""Select a part of the slow tests: CI runs only every nth slow test at each commit.

Most slow tests start real processes, which takes seconds for each, and half of the suite's time.
At every commit, tests with simulated ranks check what ranks compute. Tests with real processes,
launchers and notebooks run only at some commits. `nox -s whole` runs all of them.
"""

from collections.abc import Mapping


def waiting(units: Mapping[str, str | None], turn: str) -> set[str]:
    """Return the names of the slow tests that do not run now.

    Args:
        units: by the name of a test, its unit: a slow test or its file; None for a fast test. The
            order must be the same in each run.
        turn: "k/n": every nth unit runs, starting with the kth.
    """
    k, n = map(int, turn.split("/"))
    slow = [unit for unit in dict.fromkeys(units.values()) if unit is not None]
    late = {unit for i, unit in enumerate(slow) if i % n != k}
    return {test for test, unit in units.items() if unit in late}
