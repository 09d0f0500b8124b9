# SPDX-License-Identifier: Apache-2.0
"""Trains a little on every rank: `trains.py [how rank timeout stage]` has a rank fail on the way.

With a stage of ZeRO it is DeepSpeed that splits the model.
"""

import os
import signal
import sys
import time
from functools import partial

import torch

import accelfn as af

torch.set_num_threads(1)
told = [*sys.argv[1:], *("", "1", "60", "0")[len(sys.argv) - 1 :]]
how, culprit, timeout, stage = told


def loss_fn(model: torch.nn.Module, batch: tuple[torch.Tensor]) -> torch.Tensor:
    fail(world, state.step)
    return model(batch[0]).square().mean()


def fail(world: af.World, step: int) -> None:
    """Fail in the midst of update 3, in the way asked for."""
    if world.rank != int(culprit) or step != 3:
        return
    if how == "raise":
        msg = f"boom on rank {culprit}"
        raise ValueError(msg)
    if how == "exit":
        sys.exit(7)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "stop":
        signal.signal(signal.SIGTERM, end)
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "hang":
        time.sleep(600)


def end(*_: object) -> None:
    """Say that the end came by SIGTERM: who is ended by SIGKILL says nothing."""
    os.write(1, b"asked to end\n")
    os._exit(1)


def created(world: af.World) -> af.TrainState:
    return af.TrainState.create(
        model=lambda: torch.nn.Linear(4, 1),
        optimizer=partial(torch.optim.AdamW, lr=0.1),
        data=af.Data((torch.ones(64, 4),), global_batch_size=8),
        setup=af.chain(
            af.shard_data(),
            af.wrap_deepspeed(int(stage)) if stage != "0" else af.wrap_ddp(),
        ),
        world=world,
    )


step = af.make_step(loss_fn)
# What is imported late is so before ranks wait for each other, some for a second only.
world = af.World()
state = created(world)
step(state, next(iter(af.batches(state))))
with af.World.from_env(timeout=60, device="cpu") as world:
    world.connection.set_timeout(float(timeout))  # from here on, once all have met
    state = created(world)
    for batch in af.batches(state, until_epoch=1):
        state, metrics = step(state, batch)
    means = metrics.all_reduce_mean(world)
    af.evaluate(state, state.data, loss_fn)
    af.print_once(world, f"done after {state.step} updates, loss {means['loss']:.4f}")
