# SPDX-License-Identifier: Apache-2.0
"""Trains a little on every rank; with an argument, a rank fails in that way on the way."""

import os
import signal
import sys
import time
from functools import partial

import torch

import accelfn as af

torch.set_num_threads(1)
how = sys.argv[1] if len(sys.argv) > 1 else ""


def loss_fn(model: torch.nn.Module, batch: tuple[torch.Tensor]) -> torch.Tensor:
    fail(world, state.step)
    return model(batch[0]).square().mean()


def fail(world: af.World, step: int) -> None:
    """Fail on rank 1 in the midst of update 3, in the way asked for."""
    if world.rank != 1 or step != 3:
        return
    if how == "raise":
        raise ValueError("boom on rank 1")
    if how == "exit":
        sys.exit(7)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "hang":
        time.sleep(600)


timeout = {"hang": 3.0, "stop": 1.0}.get(how, 60.0)
with af.World.from_env(timeout=timeout, device="cpu") as world:
    data = af.Data((torch.ones(64, 4),), batch_size=8)
    state = af.TrainState.create(
        model=lambda: torch.nn.Linear(4, 1),
        optimizer=partial(torch.optim.AdamW, lr=0.1),
        data=data,
        setup=af.chain(af.shard_data(), af.wrap_ddp()),
        world=world,
    )
    step = af.make_step(loss_fn)
    for batch in af.batches(state, epochs=1):
        state, metrics = step(state, batch)
    means = af.mean(metrics, world)
    af.evaluate(state, data, loss_fn)
    af.print_once(world, f"done after {state.step} updates, loss {means['loss']:.4f}")
