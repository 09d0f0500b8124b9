# SPDX-License-Identifier: Apache-2.0
"""How many all-reduces an update makes, DistributedDataParallel's own among them."""

from collections.abc import Mapping, Sequence

import attrs
from figures import Figure
from rounds import Loop
from torch.profiler import ProfilerActivity, profile


def with_all_reduces(
    figures: Sequence[Figure], loops: Mapping[str, Loop], *, steps: int
) -> list[Figure]:
    """Return the figures with the count of an update, from a run that is not timed."""
    return [
        attrs.evolve(figure, all_reduces=_count(loops[figure.contestant], steps))
        for figure in figures
    ]


def _count(loop: Loop, steps: int) -> float:
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        loop(steps)
    events = seen.key_averages()
    return sum(e.count for e in events if e.key == "c10d::allreduce_") / steps
