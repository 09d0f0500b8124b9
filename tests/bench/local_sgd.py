# SPDX-License-Identifier: Apache-2.0
"""Benchmark of local SGD compared with DistributedDataParallel, on two processes."""

from contextlib import ExitStack
from functools import partial

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD
from counting import with_all_reduces
from figures import Figure
from loops import by_accelfn, by_hand
from models import Source, adamw, in_turn, mlp
from rounds import Loop, compared, timed
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import accelfn as af

WIDTH = 256
SYNC_EVERY = 8


def measure(rounds: int) -> list[Figure]:
    """Measure the time of a step; every rank runs the same blocks in the same order."""
    with af.World.from_env() as world:
        # in a separate function, so that DDP's objects are freed before the process group
        return _measure(world, rounds)


def _measure(world: af.World, rounds: int) -> list[Figure]:
    batches = in_turn(width=WIDTH, seed=world.rank)
    model = partial(mlp, WIDTH, classes=WIDTH)
    create = partial(af.TrainState.create, model=model, optimizer=adamw, world=world)
    apart = create(setup=af.local_sgd(sync_every=SYNC_EVERY))
    with ExitStack() as stack:
        loops = {
            "by hand, DDP": by_hand(DistributedDataParallel(model()), batches),
            "accelfn wrap_ddp": by_accelfn(create(setup=af.wrap_ddp()), batches),
            "by hand, local SGD": local_by_hand(batches),
            "accelfn local_sgd": by_accelfn(apart, batches),
            "Accelerate LocalSGD": local_by_accelerate(model(), batches, stack),
        }
        taken = timed(loops, rounds=rounds, steps=12 * SYNC_EVERY, fence=dist.barrier)
        return with_all_reduces(compared(taken), loops, steps=2 * SYNC_EVERY)


def local_by_hand(batches: Source) -> Loop:
    """Return a loop that averages all parameters, as one vector, every few updates."""
    model = mlp(WIDTH, classes=WIDTH)
    optimizer = adamw(model.parameters())

    def loop(steps: int) -> None:
        for number, (inputs, targets) in enumerate(batches(steps), start=1):
            optimizer.zero_grad()
            loss = cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            if number % SYNC_EVERY == 0:
                average(model)

    return loop


@torch.no_grad()
def average(model: torch.nn.Module) -> None:
    """Set the parameters to their mean over the ranks."""
    flat = parameters_to_vector(model.parameters())
    dist.all_reduce(flat)
    vector_to_parameters(flat.div_(dist.get_world_size()), model.parameters())


def local_by_accelerate(
    model: torch.nn.Module, batches: Source, stack: ExitStack
) -> Loop:
    """Return a loop with Accelerate's LocalSGD; its context is entered only once."""
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, adamw(model.parameters()))
    local_sgd = stack.enter_context(
        LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=SYNC_EVERY)
    )

    def loop(steps: int) -> None:
        for inputs, targets in batches(steps):
            optimizer.zero_grad()
            loss = cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            local_sgd.step()

    return loop
