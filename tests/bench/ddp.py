# SPDX-License-Identifier: Apache-2.0
"""Benchmark of a step of DistributedDataParallel, on two processes."""

import torch.distributed as dist
from accelerate import Accelerator
from counting import with_all_reduces
from figures import Figure
from lightning_fabric import Fabric
from loops import by_accelerate, by_accelfn, by_fabric, by_hand
from models import adamw, in_turn, mlp
from rounds import compared, timed
from torch.nn.parallel import DistributedDataParallel

import accelfn as af


def measure(rounds: int) -> list[Figure]:
    """Measure the time of a step; every rank runs the same blocks in the same order."""
    with af.World.from_env() as world:
        # in a separate function, so that DDP's objects are freed before the process group
        return _measure(world, rounds)


def _measure(world: af.World, rounds: int) -> list[Figure]:
    batches = in_turn(seed=world.rank)
    state = af.TrainState.create(
        model=mlp, optimizer=adamw, setup=af.wrap_ddp(), world=world
    )
    fabric = Fabric(accelerator="cpu", devices=world.size, strategy="ddp")
    fabric.launch()
    loops = {
        "by hand": by_hand(DistributedDataParallel(mlp()), batches),
        "accelfn": by_accelfn(state, batches),
        "Accelerate": by_accelerate(Accelerator(cpu=True), batches),
        "Lightning Fabric": by_fabric(fabric, batches),
    }
    taken = timed(loops, rounds=rounds, steps=100, fence=dist.barrier)
    return with_all_reduces(compared(taken), loops, steps=16)
