# SPDX-License-Identifier: Apache-2.0
"""The training loop of each library, as in the library's documentation."""

from collections.abc import Callable
from typing import Any

from accelerate import Accelerator
from device import there
from lightning_fabric import Fabric
from models import Source, adamw, loss_fn, mlp
from rounds import Loop
from torch import nn
from torch.nn.functional import cross_entropy

import accelfn as af


def by_hand(model: nn.Module, batches: Source) -> Loop:
    """Return a plain PyTorch loop for a module, which may be in DistributedDataParallel."""
    optimizer = adamw(model.parameters())

    def loop(steps: int) -> None:
        for inputs, targets in batches(steps):
            optimizer.zero_grad()
            loss = cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()

    return loop


def by_accelfn(
    state: af.TrainState, batches: Source, loss_fn: Callable[..., Any] = loss_fn
) -> Loop:
    """Return a loop that trains with accelfn."""
    step = af.make_step(loss_fn)

    def loop(steps: int) -> None:
        nonlocal state
        for batch in batches(steps):
            state, _ = step(state, batch)

    return loop


def by_accelerate(
    accelerator: Accelerator,
    batches: Source,
    make: Callable[[], nn.Module] = mlp,
    loss_fn: Callable[..., Any] = loss_fn,
) -> Loop:
    """Return a loop that trains with Hugging Face Accelerate."""
    model = there(make)
    model, optimizer = accelerator.prepare(model, adamw(model.parameters()))

    def loop(steps: int) -> None:
        for batch in batches(steps):
            optimizer.zero_grad()
            loss = loss_fn(model, batch)
            accelerator.backward(loss)
            optimizer.step()

    return loop


def by_fabric(
    fabric: Fabric,
    batches: Source,
    make: Callable[[], nn.Module] = mlp,
    loss_fn: Callable[..., Any] = loss_fn,
) -> Loop:
    """Return a loop that trains with Lightning Fabric."""
    model = there(make)
    model, optimizer = fabric.setup(model, adamw(model.parameters()))

    def loop(steps: int) -> None:
        for batch in batches(steps):
            optimizer.zero_grad()
            loss = loss_fn(model, batch)
            fabric.backward(loss)
            optimizer.step()

    return loop
