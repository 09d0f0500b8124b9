# SPDX-License-Identifier: Apache-2.0
"""Benchmark of a step of a model that torch's fully_shard shards over two processes."""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from device import DEVICE, computing, there, wait
from figures import Figure
from models import Source, in_turn, loss_fn
from rounds import Loop, compared, timed
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

import accelfn as af

adamw = partial(torch.optim.AdamW, lr=0.0)


class Decoder(nn.Module):
    """A transformer with six encoder layers over 16 tokens; a token has 4 input numbers."""

    def __init__(self, width: int = 128, layers: int = 6) -> None:
        super().__init__()
        self.embed = nn.Linear(4, width)
        layer = partial(
            nn.TransformerEncoderLayer, width, 4, 4 * width, 0.0, batch_first=True
        )
        self.layers = nn.ModuleList(layer() for _ in range(layers))
        self.head = nn.Linear(width, 10)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the logits of inputs of shape `(rows, 64)`."""
        tokens = self.embed(inputs.unflatten(1, (16, 4)))
        for layer in self.layers:
            tokens = layer(tokens)
        return self.head(tokens.mean(1))


def by_hand(model: nn.Module, batches: Source, step: Callable[[], object]) -> Loop:
    """Return a loop that trains a module that is already sharded."""

    def loop(steps: int) -> None:
        for inputs, targets in batches(steps):
            loss = cross_entropy(model(inputs), targets)
            loss.backward()
            step()
            model.zero_grad()

    return loop


def split(make: Callable[[], nn.Module] = Decoder) -> nn.Module:
    """Return a module that is sharded as in torch's tutorial."""
    model = there(make)
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def stepped(model: nn.Module) -> Callable[[], object]:
    """Return a step of torch's optimizer on DTensors, as in torch's tutorial."""
    return adamw(model.parameters()).step


def stepped_in_parts(model: nn.Module) -> Callable[[], object]:
    """Return a step of torch's optimizer on the local shards of a rank."""
    pairs = [(p, nn.Parameter(p.to_local().detach())) for p in model.parameters()]
    optimizer = adamw([part for _, part in pairs])

    def step() -> None:
        for param, part in pairs:
            part.grad = param.grad.to_local()
        optimizer.step()

    return step


def by_accelfn(world: af.World, make: Callable[[], nn.Module], batches: Source) -> Loop:
    """Return a loop that trains with accelfn."""
    state = af.TrainState.create(
        model=make, optimizer=adamw, setup=af.wrap_fsdp(), world=world
    )
    step = af.make_step(loss_fn)

    def loop(steps: int) -> None:
        nonlocal state
        for batch in batches(steps):
            state, _ = step(state, batch)

    return loop


def together() -> None:
    """Wait for the other ranks, and for the device."""
    dist.barrier()
    wait()


def measure(rounds: int) -> list[Figure]:
    """Measure the time of a step; every rank runs the same blocks in the same order."""
    with af.World.from_env(device=DEVICE) as world:
        batches = in_turn(count=8, seed=world.rank)
        tutorial, parts = split(), split()
        loops = {
            "by hand": by_hand(tutorial, batches, stepped(tutorial)),
            "by hand, optimizer on parts": by_hand(
                parts, batches, stepped_in_parts(parts)
            ),
            "accelfn": by_accelfn(world, Decoder, batches),
        }
        clock = computing()
        return compared(
            timed(loops, rounds=rounds, steps=10, fence=together, clock=clock)
        )
