# SPDX-License-Identifier: Apache-2.0
"""What is asked of tensors that have a shape and no values, on torch's meta device.

A program runs on them where only its shapes are of interest: what it sends, and how much.
"""

from typing import Any

import torch


def readable(device: torch.device) -> torch.device:
    """Return the device for tensors that will be read: the host, in place of meta."""
    return torch.device("cpu") if device.type == "meta" else device


def is_positive(total: torch.Tensor) -> bool:
    """Return whether a total is positive; one without a value is taken to be."""
    return total.is_meta or bool(total > 0)


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the host; of one without values, zeros, of which none differs."""
    return (
        torch.zeros(tensor.shape, dtype=tensor.dtype)
        if tensor.is_meta
        else tensor.cpu()
    )


def is_set_to(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors are one memory, seen alike; torch cannot say it of meta."""
    if not one.is_meta:
        return one.is_set_to(other)
    return other.is_meta and _view(one) == _view(other)


def _view(tensor: torch.Tensor) -> tuple[Any, ...]:
    place = tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]
    return place, tensor.storage_offset(), tensor.shape, tensor.stride()
