# SPDX-License-Identifier: Apache-2.0
"""Benchmark of the peak memory of a process that loads a model and runs it once.

Each contestant runs in a new process, which reads its peak memory from the system:
`load_model_memory.py NAME OURS OTHERS`.
"""

import subprocess
import sys
from pathlib import Path

import torch
from big_model import network, output, written
from figures import Figure
from load_model import loads
from rounds import compared

import accelfn as af

LIMIT = "in memory, and its largest tensor"
FILLED = "accelfn import_model, into values"


def measure(rounds: int) -> list[Figure]:
    """Measure the peak memory of each contestant, in MiB."""
    with written() as (ours, others, _):
        taken = {name: list[float]() for name in (LIMIT, *loads(ours, others), FILLED)}
        for _ in range(rounds):
            for name, peaks in taken.items():
                done = subprocess.run(
                    [sys.executable, Path(__file__), name, ours, others],
                    capture_output=True,
                    text=True,
                    check=True,
                )
                peaks.append(float(done.stdout.splitlines()[-1]))
    return compared(taken)


def largest() -> float:
    """Return the size of the model's largest tensor, in MiB."""
    with af.empty_weights():
        return max(param.nbytes for param in network().parameters()) / 2**20


def memory(word: str) -> float:
    """Return a value from this process's /proc/self/status, in MiB."""
    said = Path("/proc/self/status").read_text().split()
    return int(said[said.index(f"{word}:") + 1]) / 1024


def main(name: str, ours: str, others: str) -> None:
    """Load and run the model as this contestant does; print how much the peak memory rose."""
    torch.set_num_threads(1)
    more = largest() if name == LIMIT else 0
    before = memory("VmRSS")
    if name == LIMIT:
        model = network()
    elif name == FILLED:
        model = af.import_model(network(), others)
    else:
        model = loads(Path(ours), Path(others))[name]()
    output(model.eval())
    print(memory("VmHWM") - before + more)


if __name__ == "__main__":
    main(*sys.argv[1:])
