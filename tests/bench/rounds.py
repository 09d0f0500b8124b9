# SPDX-License-Identifier: Apache-2.0
"""How time is taken: contestants in turn, in one process, compared round by round.

A machine is faster or slower from one second to the next, and other programs run on it.
So no contestant is timed on its own: each round runs a block of every one, and a cost is
compared with the cost of the same round's base. The order turns round every other time,
so that a drift within rounds cancels too.
"""

import gc
import time
from collections.abc import Callable, Mapping
from statistics import median, quantiles
from typing import TypeAlias

from figures import Figure

Loop: TypeAlias = Callable[[int], object]
"""Takes that many updates."""


def timed(
    loops: Mapping[str, Loop],
    *,
    rounds: int,
    steps: int,
    fence: Callable[[], object] = lambda: None,
    settle: Callable[[], object] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Return milliseconds a step by contestant, one number a round.

    `fence` waits for the other ranks. It is called before a block and, so that the time
    is that of the slowest rank, at its end. `settle` ends what a block has left, behind it.
    `clock` tells seconds: those that have passed, or those in which this process computed.
    """
    for loop in loops.values():
        _block(loop, steps, fence, clock)  # allocate, build, fill caches
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
    """Compare each contestant with the first, round by round."""
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
    """Return a cost that is compared with nothing."""
    del base
    return cost
