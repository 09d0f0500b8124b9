# SPDX-License-Identifier: Apache-2.0
"""Benchmark of a step with the setup of the README's first program, on two processes."""

from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from figures import Figure
from lightning_fabric import Fabric
from loops import by_accelfn
from models import Source, in_turn
from rounds import Loop, compared, timed
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import accelfn as af

PARTS = 4
SETUP = af.chain(
    af.shard_data(),
    af.wrap_ddp(),
    af.autocast("bf16"),
    af.accumulate(num_micro_batches=PARTS),
    af.clip_grad_norm(1.0),
)
adamw = partial(torch.optim.AdamW, lr=0.0)


def net() -> nn.Module:
    """Return the network of the README."""
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def measure(rounds: int) -> list[Figure]:
    """Measure the time of an update; every rank runs the same blocks in the same order."""
    with af.World.from_env() as world:
        # in a separate function, so that DDP's objects are freed before the process group
        return _measure(world, rounds)


def _measure(world: af.World, rounds: int) -> list[Figure]:
    batches = in_turn(seed=world.rank, count=48)

    def in_parts(count: int) -> Iterator[Any]:
        return (af.micro_batches(batch, PARTS) for batch in batches(count))

    state = af.TrainState.create(model=net, optimizer=adamw, setup=SETUP, world=world)
    fabric = Fabric(
        accelerator="cpu", devices=2, strategy="ddp", precision="bf16-mixed"
    )
    fabric.launch()
    loops = {
        "by hand": by_hand(batches),
        "accelfn": by_accelfn(state, in_parts),
        "Accelerate": by_accelerate(batches),
        "Lightning Fabric": by_fabric(fabric, batches),
    }
    return compared(timed(loops, rounds=rounds, steps=50, fence=dist.barrier))


def by_hand(batches: Source) -> Loop:
    """Return a plain PyTorch loop with this setup."""
    model = DistributedDataParallel(net())
    optimizer = adamw(model.parameters())

    def loop(steps: int) -> None:
        for inputs, targets in batches(steps):
            optimizer.zero_grad()
            parts = zip(inputs.chunk(PARTS), targets.chunk(PARTS), strict=True)
            for i, (part, target) in enumerate(parts, 1):
                with nullcontext() if i == PARTS else model.no_sync():
                    with torch.autocast("cpu", torch.bfloat16):
                        loss = cross_entropy(model(part), target) / PARTS
                    loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    return loop


def by_accelerate(batches: Source) -> Loop:
    """Return a loop of Accelerate with this setup."""
    accelerator = Accelerator(
        cpu=True, mixed_precision="bf16", gradient_accumulation_steps=PARTS
    )
    model = net()
    model, optimizer = accelerator.prepare(model, adamw(model.parameters()))

    def loop(steps: int) -> None:
        for inputs, targets in batches(steps):
            for part, target in zip(
                inputs.chunk(PARTS), targets.chunk(PARTS), strict=True
            ):
                with accelerator.accumulate(model):
                    with accelerator.autocast():
                        loss = cross_entropy(model(part), target)
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()

    return loop


def by_fabric(fabric: Fabric, batches: Source) -> Loop:
    """Return a loop of Lightning Fabric with this setup."""
    model = net()
    model, optimizer = fabric.setup(model, adamw(model.parameters()))

    def loop(steps: int) -> None:
        for inputs, targets in batches(steps):
            optimizer.zero_grad()
            parts = zip(inputs.chunk(PARTS), targets.chunk(PARTS), strict=True)
            for i, (part, target) in enumerate(parts, 1):
                with fabric.no_backward_sync(model, enabled=i < PARTS):
                    loss = cross_entropy(model(part), target) / PARTS
                    fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()

    return loop
