# SPDX-License-Identifier: Apache-2.0
"""Loops that read batches and do nothing with them."""

import warnings
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from rounds import Loop
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

import accelfn as af

sgd = partial(torch.optim.SGD, lr=0.0)


def read(batches: Iterable[object], *, epochs: int = 1) -> Loop:
    """Return a loop that goes through the batches so many times."""

    def loop(_: int) -> None:
        for _ in range(epochs):
            for _ in batches:
                pass

    return loop


def read_by_accelfn(dataset: object, *, epochs: int, **options: Any) -> Loop:
    """Return a loop that reads those epochs of a shuffled dataset, in batches of 32."""
    data = af.Data(dataset, global_batch_size=32, shuffle=True, **options)
    return read(af.batches(state_on(data), until_epoch=epochs))


def state_on(data: af.Data) -> af.TrainState:
    """Return a state of next to nothing, that stands at the start of the data."""
    model = partial(nn.Linear, 1, 1)
    return af.TrainState.create(model=model, optimizer=sgd, data=data)


def prepared(loader: DataLoader) -> Iterable[object]:
    """Return the loader as Accelerate prepares it."""
    return Accelerator(cpu=True).prepare(loader)


def stateful(dataset: Dataset, **options: Any) -> Iterable[object]:
    """Return torchdata's loader, in batches of 32."""
    with warnings.catch_warnings():  # it calls what torch deprecates
        warnings.filterwarnings("ignore", "'set_vital' is deprecated")
        return StatefulDataLoader(dataset, batch_size=32, shuffle=True, **options)
