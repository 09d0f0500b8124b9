# SPDX-License-Identifier: Apache-2.0
"""Slow tests take turns: CI runs each nth of them, from one that the commit draws.

Real processes cost seconds to start, and half of the suite's time. What ranks compute is held
by laws on simulated ranks at every commit, and real ones are a sample of that. What processes
alone show, of launchers and notebooks, is seen when its turn comes. `nox -s whole` runs all.
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
