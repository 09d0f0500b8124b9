# SPDX-License-Identifier: Apache-2.0
"""Loops that only read batches."""

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
    """Return a loop that iterates over the batches `epochs` times."""

    def loop(_: int) -> None:
        for _ in range(epochs):
            for _ in batches:
                pass

    return loop


def read_by_accelfn(dataset: object, *, epochs: int, **options: Any) -> Loop:
    """Return a loop that reads epochs of a shuffled dataset with accelfn, in batches of 32."""
    data = af.Data(dataset, global_batch_size=32, shuffle=True, **options)
    return read(af.batches(state_on(data), until_epoch=epochs))


def state_on(data: af.Data) -> af.TrainState:
    """Return a state with a tiny model, at the start of the data."""
    model = partial(nn.Linear, 1, 1)
    return af.TrainState.create(model=model, optimizer=sgd, data=data)


def prepared(loader: DataLoader) -> Iterable[object]:
    """Return the loader that Accelerate's `prepare` makes."""
    return Accelerator(cpu=True).prepare(loader)


def stateful(dataset: Dataset, **options: Any) -> Iterable[object]:
    """Return torchdata's StatefulDataLoader, in batches of 32."""
    with warnings.catch_warnings():  # torchdata calls a deprecated function of torch
        warnings.filterwarnings("ignore", "'set_vital' is deprecated")
        return StatefulDataLoader(dataset, batch_size=32, shuffle=True, **options)
