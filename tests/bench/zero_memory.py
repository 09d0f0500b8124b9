# SPDX-License-Identifier: Apache-2.0
"""Benchmark of the peak memory of two processes that train with DeepSpeed's ZeRO.

Each loop runs in new processes, which measure their peak. The memory before the model was created
is subtracted: `accelfn launch --nproc 2 zero_memory.py NAME STAGE`.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from figures import Figure
from fsdp_memory import LAUNCH, STEPS, WIDTH, Layers, peak
from models import in_turn
from rounds import Loop, compared
from zero import STAGES, by_accelfn, by_hand

import accelfn as af

GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": str(2**20)}
"""Let the C library return freed memory to the system at once, not a random part of it."""

batches = in_turn(width=WIDTH)
LOOPS: dict[str, Callable[[int, af.World], Loop]] = {
    "by hand": lambda stage, _: by_hand(stage, Layers, batches),
    "accelfn": lambda stage, world: by_accelfn(stage, Layers, batches, world),
}


def measure(rounds: int) -> list[Figure]:
    """Measure the peak memory of each loop, in MiB."""
    return [figure for stage in STAGES for figure in _of(stage, rounds)]


def _of(stage: int, rounds: int) -> list[Figure]:
    taken: dict[str, list[float]] = {f"stage {stage}, {name}": [] for name in LOOPS}
    for _ in range(rounds):
        for name in LOOPS:
            done = subprocess.run(
                [sys.executable, *LAUNCH, Path(__file__), name, str(stage)],
                env={**os.environ, **GIVES_BACK},
                capture_output=True,
                text=True,
                check=True,
            )
            taken[f"stage {stage}, {name}"].append(float(done.stdout.split()[-1]))
    return compared(taken)


if __name__ == "__main__":
    torch.set_num_threads(1)
    with af.World.from_env() as world:
        before = peak()
        LOOPS[sys.argv[1]](int(sys.argv[2]), world)(STEPS)
        if world.is_main:
            print(peak() - before)
