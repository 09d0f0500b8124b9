# SPDX-License-Identifier: Apache-2.0
"""Benchmark of an all-reduce of many small tensors over two processes."""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import reduce
from counting import with_all_reduces
from figures import Figure
from rounds import Loop, compared, timed

import accelfn as af

Tree = dict[str, torch.Tensor]


def measure(rounds: int) -> list[Figure]:
    """Measure the time of a sum; every rank runs the same blocks in the same order."""
    with af.World.from_env() as world:
        return _measure(world, rounds)


def _measure(world: af.World, rounds: int) -> list[Figure]:
    Accelerator(cpu=True)  # creates the global state that Accelerate's reduce needs
    given = {f"layer {i}": torch.randn(8, 8) for i in range(100)}
    loops = {
        "by hand": again(by_hand, given),
        "accelfn": again(lambda each: af.all_reduce(each, world), given),
        "Accelerate": again(partial(reduce, reduction="sum"), given),
    }
    taken = timed(loops, rounds=rounds, steps=10, fence=dist.barrier)
    return with_all_reduces(compared(taken), loops, steps=4)


def by_hand(given: Tree) -> Tree:
    """Sum all tensors as one vector, and split the vector again."""
    flat = torch.cat([each.reshape(-1) for each in given.values()])
    dist.all_reduce(flat)
    parts = flat.split([each.numel() for each in given.values()])
    return {
        name: part.view_as(each)
        for (name, each), part in zip(given.items(), parts, strict=True)
    }


def again(total: Callable[[Tree], Tree], given: Tree) -> Loop:
    """Return a loop that calls `total` on the tensors."""

    def loop(steps: int) -> None:
        for _ in range(steps):
            total(given)

    return loop
