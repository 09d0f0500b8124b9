# SPDX-License-Identifier: Apache-2.0
"""Slow tests take turns: CI runs each nth of them, and at each commit others.

Real processes cost seconds to start, and half of the suite's time. What they hold is held by
laws on simulated ranks at every commit; they are a sample of that, and so a part of the sample
at a time is enough. `nox -s whole` runs all of them.
"""

from collections.abc import Mapping


def waiting(units: Mapping[str, str | None], turn: str) -> set[str]:
    """Return the tests that wait for their turn.

    Args:
        units: by name of a test what has its turn with it, in any order that stays; None of
            a test that is fast.
        turn: "k/n": of the units each nth has its turn, from the kth.
    """
    k, n = map(int, turn.split("/"))
    slow = [unit for unit in dict.fromkeys(units.values()) if unit is not None]
    late = {unit for i, unit in enumerate(slow) if i % n != k}
    return {test for test, unit in units.items() if unit in late}
