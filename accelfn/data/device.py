# SPDX-License-Identifier: Apache-2.0
"""Batches onto the device, the next one while this one is computed on."""

from collections.abc import Iterator
from typing import Any, TypeVar

import torch

from accelfn.base import tree
from accelfn.base.accelerator import staged

T = TypeVar("T")


def on_device(
    pairs: Iterator[tuple[T, list[Any]]], device: torch.device
) -> Iterator[tuple[T, list[Any]]]:
    """Yield the pairs with their values on a device.

    To an accelerator the next pair is copied from pinned memory on a stream of its own, while
    the caller computes on the one before; the copy is waited for where the values are used.
    """
    if device.type == "cpu":
        return pairs
    # mps has one stream, and the host's memory; meta has neither
    if device.type in ("mps", "meta"):
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
    side = torch.Stream(device)

    def staged_leaf(leaf: Any) -> Any:
        return staged(leaf, device) if isinstance(leaf, torch.Tensor) else leaf

    def copied() -> tuple[T, list[Any]] | None:
        pair = next(pairs, None)
        if pair is None:
            return None
        what, values = pair
        with side:
            ready = [tree.tree_map(staged_leaf, value) for value in values]
            return what, [tree.to_device(each, device, opaque=False) for each in ready]

    ahead = copied()
    while ahead is not None:
        what, values = ahead
        current = torch.accelerator.current_stream(device)
        current.wait_stream(side)
        for leaf in tree.tensor_leaves(values):
            if not leaf.is_cpu:  # as the lengths of a packed sequence
                # the caller's stream uses memory that the side stream allocated
                leaf.record_stream(current)
        ahead = copied()
        # what is in an object nobody sees: it is moved on the caller's stream
        yield what, [tree.to_device(value, device) for value in values]
