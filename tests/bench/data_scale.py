# SPDX-License-Identifier: Apache-2.0
"""Benchmark of the first batch of an epoch with 10**12 samples: at its start, and near its end.

Each start runs in a new process, to measure its peak memory: `data_scale.py NAME`.
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
    """A dataset of n samples; each sample is its index."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        return index


def by_accelfn(samples: int) -> Start:
    """Return a function that reads the first batch after `samples` samples."""
    data = af.Data(Numbers(10**12), global_batch_size=32, shuffle=True)
    state = state_on(data)
    return lambda: next(iter(af.batches(af.seek(state, samples))))


def by_torch(n: int) -> Start:
    """Return a function that draws the first index of torch's RandomSampler."""
    return lambda: next(iter(RandomSampler(Numbers(n))))


STARTS = {
    "accelfn, 10^12 samples": lambda: by_accelfn(0),
    "accelfn, 10^12 samples, from 9·10^11 on": lambda: by_accelfn(9 * 10**11),
    "torch RandomSampler, 10^8 samples": lambda: by_torch(10**8),
}


def measure(rounds: int) -> list[Figure]:
    """Measure the time of each start, in milliseconds."""
    return _figures(rounds, "milliseconds")


def measure_memory(rounds: int) -> list[Figure]:
    """Measure how much memory each start adds to the process's peak, in MiB."""
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
    """Return the current memory of this process, in MiB."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def peak() -> float:
    """Return the peak memory of this process, in MiB."""
    return getrusage(RUSAGE_SELF).ru_maxrss / 2**10


def tell(name: str) -> None:
    """Run a start once; print its time and memory as JSON."""
    start = STARTS[name]()
    memory, begin = resident(), time.perf_counter()
    start()
    seconds = time.perf_counter() - begin
    added = max(resident(), peak()) - memory
    print(json.dumps({"milliseconds": seconds * 1000, "mebibytes": added}))


if __name__ == "__main__":
    tell(sys.argv[1])
