# SPDX-License-Identifier: Apache-2.0
"""Measure times: contestants run in turn in one process, and are compared in each round.

The speed of a machine changes from one second to the next. So each round runs a block of steps of
every contestant, and compares its time with that of the base in the same round. Every other round
runs in reverse order, so that a drift of the speed within rounds cancels.
"""

import gc
import time
from collections.abc import Callable, Mapping
from statistics import median, quantiles
from typing import TypeAlias

from figures import Figure

Loop: TypeAlias = Callable[[int], object]
"""A function that runs a number of updates."""


def timed(
    loops: Mapping[str, Loop],
    *,
    rounds: int,
    steps: int,
    fence: Callable[[], object] = lambda: None,
    settle: Callable[[], object] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Return the milliseconds of a step by contestant, one number for each round.

    Args:
        loops: the contestants' loops, by name.
        rounds: the number of rounds.
        steps: the number of steps of a block.
        fence: waits for the other ranks, before and at the end of a block. So the time is that
            of the slowest rank.
        settle: cleans up after a block, outside of the measured time.
        clock: returns seconds: elapsed time, or CPU time of this process.
    """
    for loop in loops.values():
        _block(loop, steps, fence, clock)  # warm up: allocate, build, fill caches
        settle()
    taken: dict[str, list[float]] = {name: [] for name in loops}
    for turn in range(rounds):
        for name in list(loops)[:: -1 if turn % 2 else 1]:
            taken[name].append(_block(loops[name], steps, fence, clock))
            settle()
    return taken


def _block(
    loop: Loop, steps: int, fence: Callable[[], object], clock: Callable[[], float]
) -> float:
    gc.collect()
    gc.disable()
    fence()
    start = clock()
    loop(steps)
    fence()
    seconds = clock() - start
    gc.enable()
    return seconds * 1000 / steps


def compared(
    taken: Mapping[str, list[float]],
    how: Callable[[float, float], float] = lambda cost, base: cost / base,
) -> list[Figure]:
    """Compare each contestant with the first contestant in each round."""
    base = next(iter(taken.values()))
    figures = []
    for name, costs in taken.items():
        paired = [how(*pair) for pair in zip(costs, base, strict=True)]
        low, middle, high = quantiles(paired, n=4, method="inclusive")
        figures.append(
            Figure(
                contestant=name,
                milliseconds=median(costs),
                value=middle,
                low=low,
                high=high,
            )
        )
    return figures


def itself(cost: float, base: float) -> float:
    """Return the cost itself, without a comparison."""
    del base
    return cost
