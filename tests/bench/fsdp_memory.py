# SPDX-License-Identifier: Apache-2.0
"""Benchmark of the peak memory of two processes that train a sharded model.

Each loop runs in new processes, which measure their peak. The memory before the model was created
is subtracted: `accelfn launch --nproc 2 fsdp_memory.py NAME`.
"""

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from resource import RUSAGE_SELF, getrusage

import torch
from figures import Figure
from fsdp import adamw, by_hand, stepped
from models import in_turn, loss_fn
from rounds import Loop, compared
from torch import nn
from torch.distributed.fsdp import fully_shard

import accelfn as af

LAYERS, WIDTH = 10, 2048  # 10 * 2048 * 2049 = 42 million
STEPS = 3
LAUNCH = "-m", "accelfn", "launch", "--nproc", "2"


class Layers(nn.Module):
    """Linear layers, each an FSDP unit; targets use 10 of the 2,048 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        for layer in self.layers:
            x = layer(x).relu()
        return x


def split_by_hand() -> Loop:
    """Return a loop that trains with torch's fully_shard."""
    model = Layers()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    return by_hand(model, in_turn(width=WIDTH), stepped(model))


def accelfn(world: af.World, **options: str) -> Loop:
    """Return a loop that trains with accelfn."""
    setup = af.wrap_fsdp()
    state = af.TrainState.create(
        model=Layers, optimizer=adamw, setup=setup, world=world, **options
    )
    step = af.make_step(loss_fn)

    def loop(steps: int) -> None:
        nonlocal state
        for batch in in_turn(width=WIDTH)(steps):
            state, _ = step(state, batch)

    return loop


LOOPS: dict[str, Callable[[af.World], Loop]] = {
    "by hand": lambda _: split_by_hand(),
    "accelfn": accelfn,
    'accelfn, init="shard"': partial(accelfn, init="shard"),
}


def measure(rounds: int) -> list[Figure]:
    """Measure the peak memory of each loop, in MiB."""
    taken: dict[str, list[float]] = {name: [] for name in LOOPS}
    for _ in range(rounds):
        for name in LOOPS:
            done = subprocess.run(
                [sys.executable, *LAUNCH, Path(__file__), name],
                capture_output=True,
                text=True,
                check=True,
            )
            taken[name].append(float(done.stdout.split()[-1]))
    return compared(taken)


def peak() -> float:
    """Return the peak memory of this process, in MiB."""
    return getrusage(RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    torch.set_num_threads(1)
    with af.World.from_env() as world:
        before = peak()
        LOOPS[sys.argv[1]](world)(STEPS)
        if world.is_main:
            print(peak() - before)
