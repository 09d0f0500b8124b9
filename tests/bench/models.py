# SPDX-License-Identifier: Apache-2.0
"""What is trained: a small network, its batches, and an optimizer that moves nothing.

The learning rate is 0. An update costs the same, and the weights do not drift to where
numbers are denormal, and slow, after the thousands of updates that a benchmark takes.
"""

import time
from collections.abc import Callable, Iterable
from functools import partial
from itertools import cycle, islice
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

Batch: TypeAlias = tuple[torch.Tensor, torch.Tensor]
Source: TypeAlias = Callable[[int], Iterable[Batch]]
"""Gives that many batches."""

adamw = partial(torch.optim.AdamW, lr=0.0, fused=True)


def mlp(width: int = 64, *, classes: int = 10) -> nn.Module:
    """Return five square layers with ReLU, and one to the classes."""
    layers: list[nn.Module] = []
    for _ in range(5):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, classes))


def rows(count: int, *, width: int = 64, seed: int = 0) -> Batch:
    """Return that many random rows with classes."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, width, generator=generator)
    return inputs, torch.randint(10, (count,), generator=generator)


def in_turn(*, width: int = 64, seed: int = 0) -> Source:
    """Return 16 batches of 32 rows, made once and given again and again."""
    made = [rows(32, width=width, seed=16 * seed + i) for i in range(16)]
    return lambda count: islice(cycle(made), count)


def loss_fn(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the loss, as accelfn wants it; other loops have this line inline."""
    inputs, targets = batch
    return cross_entropy(model(inputs), targets)


class Arrays(Dataset):
    """Rows of arrays of one length, item by item."""

    def __init__(self, *columns: Any) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns[0])

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        return tuple(column[index] for column in self.columns)


class Slow(Arrays):
    """Rows that take a millisecond each, as if they were decoded or fetched."""

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        time.sleep(0.001)
        return super().__getitem__(index)
