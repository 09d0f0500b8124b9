# SPDX-License-Identifier: Apache-2.0
"""What a process takes at its peak to load a model and use it once.

Each contestant is in a process of its own, which the system tells what it had at most:
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

LIMIT = "the model and its largest tensor"
FILLED = "accelfn import_model, into values"


def measure(rounds: int) -> list[Figure]:
    """Return each one's peak, in MiB, beside the bytes that a model has."""
    with written() as (ours, others, _):
        names = [*loads(ours, others), FILLED]
        taken: dict[str, list[float]] = {LIMIT: [limit()] * rounds}
        taken |= {name: [] for name in names}
        for _ in range(rounds):
            for name in names:
                done = subprocess.run(
                    [sys.executable, Path(__file__), name, ours, others],
                    capture_output=True,
                    text=True,
                    check=True,
                )
                taken[name].append(float(done.stdout.splitlines()[-1]))
    return compared(taken)


def limit() -> float:
    """Return how many MiB the model and its largest tensor have."""
    with af.empty_weights():
        sizes = [param.nbytes for param in network().parameters()]
    return (sum(sizes) + max(sizes)) / 2**20


def memory(word: str) -> float:
    """Return what the system says of this process's memory, in MiB."""
    said = Path("/proc/self/status").read_text().split()
    return int(said[said.index(f"{word}:") + 1]) / 1024


def main(name: str, ours: str, others: str) -> None:
    """Load once as this contestant does, and print by how much its memory rose at most."""
    torch.set_num_threads(1)
    before = memory("VmRSS")
    if name == FILLED:
        model = af.import_model(network(), others)
    else:
        model = loads(Path(ours), Path(others))[name]()
    output(model.eval())
    print(memory("VmHWM") - before)


if __name__ == "__main__":
    main(*sys.argv[1:])
