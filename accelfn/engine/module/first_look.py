# SPDX-License-Identifier: Apache-2.0
"""A first look at a loss: it is computed twice on one sample, before anything is trained."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from accelfn.base import draws, products, tree
from accelfn.errors import BatchError


class Coarsest(TorchFunctionMode):
    """Notes the precision in which torch computes inside: the largest `eps`."""

    def __init__(self) -> None:
        """Begin with none."""
        super().__init__()
        self.eps = 0.0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call a function, and look at what it returns."""
        del types
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor) and found.is_floating_point():
            is_float32 = found.dtype is torch.float32
            eps = products.eps() if is_float32 else torch.finfo(found.dtype).eps
            self.eps = max(self.eps, eps)
        return found


@contextmanager
def untouched(model: nn.Module, device: torch.device) -> Generator[Any]:
    """Let a model be evaluated, and leave it and the default generators as they are.

    Yields: a function that says whether random numbers were drawn.
    """
    modules = [*model.modules()]
    training = [module.training for module in modules]
    tables = [(m._buffers, dict(m._buffers)) for m in modules]  # pyright: ignore[reportPrivateUsage]
    try:
        with torch.no_grad(), draws.seeded(0, device):
            before = draws.generator_states(device)
            for table, buffers in tables:
                table.update(
                    {n: b if b is None else b.clone() for n, b in buffers.items()}
                )
            model.eval()
            yield lambda: draws.generator_states(device) != before
    finally:
        for module, was in zip(modules, training, strict=True):
            module.training = was
        for table, buffers in tables:
            table.clear()
            table.update(buffers)


def first_of(batch: Any) -> Any:
    """Return the first sample of a batch, or all where some tensor goes by no sample."""
    try:
        tree.num_rows(batch)
    except BatchError:
        return batch

    def first(leaf: Any) -> Any:
        return leaf[:1] if isinstance(leaf, torch.Tensor) and leaf.ndim else leaf

    return tree.tree_map(first, batch)
