# SPDX-License-Identifier: Apache-2.0
"""Count the all-reduces of an update, including those of DistributedDataParallel."""

from collections.abc import Mapping, Sequence

import attrs
from figures import Figure
from rounds import Loop
from torch.profiler import ProfilerActivity, profile


def with_all_reduces(
    figures: Sequence[Figure], loops: Mapping[str, Loop], *, steps: int
) -> list[Figure]:
    """Add the number of all-reduces of an update to the figures, from a run without timing."""
    return [
        attrs.evolve(figure, all_reduces=_count(loops[figure.contestant], steps))
        for figure in figures
    ]


def _count(loop: Loop, steps: int) -> float:
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        loop(steps)
    events = seen.key_averages()
    return sum(e.count for e in events if e.key == "c10d::allreduce_") / steps
