# SPDX-License-Identifier: Apache-2.0
"""Benchmark of the peak memory of training a model with 42 million parameters.

Each loop runs in a new process, which measures its peak memory: `step_memory.py NAME`.
"""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from resource import RUSAGE_SELF, getrusage

import torch
from accelerate import Accelerator
from device import IS_CPU, alone, there
from figures import Figure
from loops import by_accelerate, by_accelfn, by_hand
from models import adamw, in_turn
from rounds import compared
from torch import nn

import accelfn as af

LAYERS, WIDTH = 10, 2048  # 10 * 2048 * 2049 = 42 million
STEPS = 3


def network() -> nn.Module:
    """Return the model; its last layer has 2,048 classes, and targets use 10 of them."""
    layers: list[nn.Module] = []
    for _ in range(LAYERS):
        layers += [nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def accelfn() -> Callable[[int], object]:
    """Return accelfn's loop."""
    state = af.TrainState.create(model=network, optimizer=adamw, world=alone())
    return by_accelfn(state, in_turn(width=WIDTH))


def accelerated() -> Callable[[int], object]:
    """Return Accelerate's loop."""
    return by_accelerate(Accelerator(cpu=IS_CPU), in_turn(width=WIDTH), network)


LOOPS = {
    "by hand": lambda: by_hand(there(network), in_turn(width=WIDTH)),
    "accelfn": accelfn,
    "Accelerate": accelerated,
}


def measure(rounds: int) -> list[Figure]:
    """Measure the peak memory of each loop, in MiB."""
    taken: dict[str, list[float]] = {name: [] for name in LOOPS}
    for _ in range(rounds):
        for name in LOOPS:
            done = subprocess.run(
                [sys.executable, Path(__file__), name],
                capture_output=True,
                text=True,
                check=True,
            )
            taken[name].append(float(done.stdout.splitlines()[-1]))
    return compared(taken)


if __name__ == "__main__":
    torch.set_num_threads(1)
    LOOPS[sys.argv[1]]()(STEPS)
    host = getrusage(RUSAGE_SELF).ru_maxrss * 1024
    print((host if IS_CPU else torch.accelerator.max_memory_allocated()) / 2**20)
