# SPDX-License-Identifier: Apache-2.0
"""The first batch of an epoch over 10**12 samples, and of one resumed near its end.

Each start is in a process of its own, which knows its peak memory: `data_scale.py NAME`.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from resource import RUSAGE_SELF, getrusage

from figures import Figure
from reading import state_on
from rounds import compared, itself
from torch.utils.data import RandomSampler

import accelfn as af

Start = Callable[[], object]


class Numbers:
    """As many samples as there are numbers below n, each of them its own index."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        return index


def by_accelfn(samples: int) -> Start:
    """Read the first batch from there on."""
    data = af.Data(Numbers(10**12), global_batch_size=32, shuffle=True)
    state = state_on(data)
    return lambda: next(iter(af.batches(af.seek(state, samples))))


def by_torch(n: int) -> Start:
    """Draw the first index."""
    return lambda: next(iter(RandomSampler(Numbers(n))))


STARTS = {
    "accelfn, 10^12 samples": lambda: by_accelfn(0),
    "accelfn, 10^12 samples, from 9·10^11 on": lambda: by_accelfn(9 * 10**11),
    "torch RandomSampler, 10^8 samples": lambda: by_torch(10**8),
}


def measure(rounds: int) -> list[Figure]:
    """Return how long each takes, in milliseconds."""
    return _figures(rounds, "milliseconds")


def measure_memory(rounds: int) -> list[Figure]:
    """Return by how much each lets the peak of the process's memory grow, in MiB."""
    return _figures(rounds, "mebibytes")


def _figures(rounds: int, what: str) -> list[Figure]:
    taken: dict[str, list[float]] = {name: [] for name in STARTS}
    for _ in range(rounds):
        for name, figures in taken.items():
            words = [sys.executable, __file__, name]
            told = subprocess.run(words, check=True, capture_output=True).stdout
            figures.append(json.loads(told)[what])
    return compared(taken, how=itself)


def resident() -> float:
    """Return how much memory this process has now, in MiB."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def peak() -> float:
    """Return the most memory that this process has had, in MiB."""
    return getrusage(RUSAGE_SELF).ru_maxrss / 2**10


def tell(name: str) -> None:
    """Start once, and print what that took."""
    start = STARTS[name]()
    memory, begin = resident(), time.perf_counter()
    start()
    seconds = time.perf_counter() - begin
    added = max(resident(), peak()) - memory
    print(json.dumps({"milliseconds": seconds * 1000, "mebibytes": added}))


if __name__ == "__main__":
    tell(sys.argv[1])
