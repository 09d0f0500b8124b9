# SPDX-License-Identifier: Apache-2.0
"""What a state holds, by name, wherever it is."""

from typing import Any

import torch

import accelfn as af
from tests.internals import tree
from tests.strategies import tensors


def on_cpu(state: af.TrainState) -> dict[str, torch.Tensor]:
    """Return a state's tensors on the host."""
    return {name: each.cpu() for name, each in tensors(state).items()}


def different(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> list[str]:
    """Return the names of those that are not bitwise the same."""
    same = {n for n in one.keys() & two.keys() if _bits(one[n]) == _bits(two[n])}
    return sorted((one.keys() | two.keys()) - same)


def _bits(each: torch.Tensor) -> Any:
    return each.dtype, each.shape, each.reshape(-1).view(torch.uint8).tolist()


def device_names(value: Any) -> set[str]:
    """Return the kinds of devices that a tree's tensors are on."""
    return {leaf.device.type for leaf in tree.tensor_leaves(value)}
