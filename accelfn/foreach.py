# SPDX-License-Identifier: Apache-2.0
"""One call for many tensors: torch's fused operators on lists, which have no public name.

Every function works in place, and does nothing to an empty list.
"""

from collections.abc import Iterable

import torch


def mul_(tensors: Iterable[torch.Tensor], factor: float | torch.Tensor) -> None:
    """Multiply each tensor by one number."""
    found = list(tensors)
    if found:
        torch._foreach_mul_(found, factor)  # pyright: ignore[reportPrivateUsage]


def div_(tensors: Iterable[torch.Tensor], divisor: float | torch.Tensor) -> None:
    """Divide each tensor by one number."""
    found = list(tensors)
    if found:
        torch._foreach_div_(found, divisor)  # pyright: ignore[reportPrivateUsage]


def add_(
    tensors: Iterable[torch.Tensor], others: Iterable[torch.Tensor], *, alpha: float
) -> None:
    """Add `alpha` times another tensor to each."""
    found = list(tensors)
    if found:
        torch._foreach_add_(found, list(others), alpha=alpha)  # pyright: ignore[reportPrivateUsage]


def copy_(tensors: Iterable[torch.Tensor], sources: Iterable[torch.Tensor]) -> None:
    """Copy another tensor into each."""
    found = list(tensors)
    if found:
        torch._foreach_copy_(found, list(sources))  # pyright: ignore[reportPrivateUsage]


def clamp_(tensors: Iterable[torch.Tensor], low: float, high: float) -> None:
    """Bound every element of each."""
    found = list(tensors)
    if found:
        torch._foreach_clamp_min_(found, low)  # pyright: ignore[reportPrivateUsage]
        torch._foreach_clamp_max_(found, high)  # pyright: ignore[reportPrivateUsage]
