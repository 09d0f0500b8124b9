# SPDX-License-Identifier: Apache-2.0
"""Batches onto the device, the next one while this one is computed on."""

from collections.abc import Iterator
from typing import Any, TypeVar

import torch

from accelfn.base import tree

T = TypeVar("T")


def on_device(
    pairs: Iterator[tuple[T, list[Any]]], device: torch.device
) -> Iterator[tuple[T, list[Any]]]:
    """Yield the pairs with their values on a device.

    To a CUDA device the next pair is copied from pinned memory on a stream of its own, while
    the caller computes on the one before; the copy is waited for where the values are used.
    """
    if device.type == "cpu":
        return pairs
    if device.type != "cuda":
        return _moved(pairs, device)
    return _prefetched(pairs, device)


def _moved(
    pairs: Iterator[tuple[T, list[Any]]], device: torch.device
) -> Iterator[tuple[T, list[Any]]]:
    for what, values in pairs:
        yield what, [tree.to_device(value, device) for value in values]


def _prefetched(
    pairs: Iterator[tuple[T, list[Any]]], device: torch.device
) -> Iterator[tuple[T, list[Any]]]:
    side = torch.cuda.Stream(device)

    def copied() -> tuple[T, list[Any]] | None:
        pair = next(pairs, None)
        if pair is None:
            return None
        what, values = pair
        with torch.cuda.stream(side):
            pinned = [tree.tree_map(_pinned, value) for value in values]
            return what, [tree.to_device(each, device, opaque=False) for each in pinned]

    ahead = copied()
    while ahead is not None:
        what, values = ahead
        current = torch.cuda.current_stream(device)
        current.wait_stream(side)
        for leaf in tree.tensor_leaves(values):
            if leaf.is_cuda:  # of a packed sequence, lengths stay on the CPU
                # the caller's stream uses memory that the side stream allocated
                leaf.record_stream(current)
        ahead = copied()
        # what is in an object nobody sees: it is moved on the caller's stream
        yield what, [tree.to_device(value, device) for value in values]


def _pinned(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu":
        return leaf.pin_memory()
    return leaf
