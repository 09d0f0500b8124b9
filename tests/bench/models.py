# SPDX-License-Identifier: Apache-2.0
"""The models of the benchmarks, their batches, and an optimizer with a learning rate of 0.

An update with learning rate 0 costs the same. But after thousands of updates, the weights do not
reach denormal numbers, which are slow.
"""

import time
from collections.abc import Callable, Iterable
from functools import partial
from itertools import cycle, islice
from typing import Any, TypeAlias

import torch
from device import DEVICE
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

Batch: TypeAlias = tuple[torch.Tensor, torch.Tensor]
Source: TypeAlias = Callable[[int], Iterable[Batch]]
"""A function that returns a number of batches."""

adamw = partial(torch.optim.AdamW, lr=0.0, fused=True)


def mlp(width: int = 64, *, classes: int = 10) -> nn.Module:
    """Return a network of five square linear layers with ReLU, and a layer to the classes."""
    layers: list[nn.Module] = []
    for _ in range(5):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, classes))


def convnet() -> nn.Module:
    """Return a network of two convolutions on 3x16x16 images, and a layer to the classes."""
    return nn.Sequential(
        nn.Unflatten(1, (3, 16, 16)),
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(4),
        nn.Flatten(),
        nn.Linear(128, 10),
    )


class Transformer(nn.Module):
    """A transformer with four layers of width 64, over 16 tokens of 4 input numbers each."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 64)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
            for _ in range(4)
        )
        self.head = nn.Linear(64, 10)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the logits of inputs of shape `(rows, 64)`."""
        tokens = self.embed(inputs.unflatten(1, (16, 4)))
        for layer in self.layers:
            tokens = layer(tokens)
        return self.head(tokens.mean(1))


def rows(count: int, *, width: int = 64, seed: int = 0) -> Batch:
    """Return a number of random rows with their classes."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, width, generator=generator)
    return inputs, torch.randint(10, (count,), generator=generator)


def in_turn(*, width: int = 64, count: int = 32, seed: int = 0) -> Source:
    """Create 16 batches on the device; return a function that cycles through the batches."""
    drawn = (rows(count, width=width, seed=16 * seed + i) for i in range(16))
    made = [tuple(column.to(DEVICE) for column in batch) for batch in drawn]
    return lambda count: islice(cycle(made), count)


def loss_fn(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the loss; accelfn needs a function, other loops have this line inline."""
    inputs, targets = batch
    return cross_entropy(model(inputs), targets)


MODELS: dict[str, tuple[Callable[[], nn.Module], Source, int]] = {
    "mlp": (mlp, in_turn(), 100),
    "convnet": (convnet, in_turn(width=768), 20),
    "transformer": (Transformer, in_turn(), 20),
}
"""By name: a model, its batches, and the number of steps of a block."""


class Arrays(Dataset):
    """A dataset of rows of arrays; all arrays have the same length."""

    def __init__(self, *columns: Any) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns[0])

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        return tuple(column[index] for column in self.columns)


class Slow(Arrays):
    """A dataset that needs a millisecond for each row, as if it decoded the row."""

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        time.sleep(0.001)
        return super().__getitem__(index)
