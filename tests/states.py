# SPDX-License-Identifier: Apache-2.0
"""Small states for tests that need any state, their step, and the bits of a state."""

import warnings
from functools import partial
from typing import Any

import attrs
import torch
from torch import nn

import accelfn as af
from tests.internals import local

SGD = partial(torch.optim.SGD, lr=0.1)
FIELDS = (
    *("params", "buffers", "opt_state", "slots"),
    *("step", "num_skipped", "cursor", "seed"),
)


create = partial(af.TrainState.create, optimizer=SGD)
"""`TrainState.create` with SGD, for tests that need any optimizer."""


def square(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the mean of the squares of a model's outputs."""
    return model(batch).square().mean()


STEP = af.make_step(square)


def recorded_warnings() -> warnings.catch_warnings:
    """Return a context manager that gives a list of accelfn's warnings in its block."""
    category = af.errors.AccelfnWarning
    return warnings.catch_warnings(record=True, action="always", category=category)


def linear_state(inputs: int = 1, outputs: int = 1, /, **options: Any) -> af.TrainState:
    """Return a state of a linear layer and SGD; options are those of `TrainState.create`."""
    model = partial(nn.Linear, inputs, outputs)
    return af.TrainState.create(**{"model": model, "optimizer": SGD, **options})


def read(
    data: Any,
    *,
    epochs: int = 1,
    cursor: af.typing.Cursor | None = None,
    **options: Any,
) -> list[af.Batch]:
    """Return the batches that a linear state reads of data, from a cursor on."""
    state = linear_state(**{"data": data, "setup": af.shard_data(), **options})
    state = attrs.evolve(state, cursor=cursor or state.cursor)
    return list(af.batches(state, until_epoch=epochs))


def bits(tree: Any) -> Any:
    """Return a tree with the bytes of its tensors, of split ones the rank's part's."""
    if isinstance(tree, torch.Tensor):
        tree = local(tree)
        flat = tree.detach().resolve_conj().resolve_neg().reshape(-1)
        # a copy, for of one element or none any stride counts as contiguous
        raw = torch.empty(flat.shape, dtype=flat.dtype).copy_(flat).view(torch.uint8)
        return str(tree.dtype), tuple(tree.shape), raw.numpy().tobytes()
    if hasattr(tree, "items"):
        return {key: bits(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(bits(value) for value in tree)
    return repr(tree)


def values(state: af.TrainState) -> dict[str, Any]:
    """Return all that is saved of a state, to be compared bitwise."""
    return {name: bits(getattr(state, name)) for name in FIELDS}
