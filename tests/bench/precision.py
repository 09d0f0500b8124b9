# SPDX-License-Identifier: Apache-2.0
"""Benchmark of a step of a decoder in bf16, on an accelerator."""

import torch
from accelerate import Accelerator
from device import DEVICE, alone, there, wait
from figures import Figure
from lightning_fabric import Fabric
from loops import by_accelerate, by_accelfn, by_fabric
from models import Batch, adamw
from rounds import Loop, compared, timed
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import accelfn as af

WIDTH, LAYERS, LENGTH, ROWS = 2048, 2, 1024, 8


class Block(nn.Module):
    """A decoder block: causal attention with 16 heads, and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.three, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return features with the shape of the input."""
        three = self.three(self.norms[0](x)).unflatten(-1, (3, 16, -1))
        query, key, value = three.transpose(1, 3).unbind(2)
        attended = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(self.up(self.norms[1](x)).relu())


def decoder() -> nn.Module:
    """Return a decoder with 101 million parameters, and 16 classes for each position."""
    return nn.Sequential(*(Block() for _ in range(LAYERS)), nn.Linear(WIDTH, 16))


def batches(count: int) -> list[Batch]:
    """Return the same batch of 8 sequences with 1,024 positions a number of times."""
    return [BATCH] * count


BATCH = (
    torch.randn(ROWS, LENGTH, WIDTH, device=DEVICE),
    torch.randint(16, (ROWS, LENGTH), device=DEVICE),
)


def loss_fn(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the mean cross entropy over all positions."""
    inputs, classes = batch
    return cross_entropy(model(inputs).flatten(0, 1), classes.flatten())


def by_hand(model: nn.Module) -> Loop:
    """Return a plain loop with torch.autocast."""
    optimizer = adamw(model.parameters())

    def loop(steps: int) -> None:
        for batch in batches(steps):
            optimizer.zero_grad()
            with torch.autocast(DEVICE.type, torch.bfloat16):
                loss = loss_fn(model, batch)
            loss.backward()
            optimizer.step()

    return loop


def ours(*setup: object) -> Loop:
    """Return a loop that trains with accelfn and these transforms."""
    state = af.TrainState.create(
        model=decoder, optimizer=adamw, setup=af.chain(*setup), world=alone()
    )
    return by_accelfn(state, batches, loss_fn)


def measure(rounds: int) -> list[Figure]:
    """Measure the time of a step in bf16, compared with a plain PyTorch loop."""
    fabric = Fabric(accelerator=DEVICE.type, devices=1, precision="bf16-mixed")
    accelerator = Accelerator(mixed_precision="bf16")
    loops = {
        "by hand": by_hand(there(decoder)),
        "accelfn": ours(af.autocast("bf16")),
        "Accelerate": by_accelerate(accelerator, batches, decoder, loss_fn),
        "Lightning Fabric": by_fabric(fabric, batches, decoder, loss_fn),
    }
    return compared(timed(loops, rounds=rounds, steps=5, fence=wait))
