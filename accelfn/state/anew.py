# SPDX-License-Identifier: Apache-2.0
"""Slots of a state that gets other parameters: an average, or an anchor, may begin with them."""

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch

from accelfn.base import tree
from accelfn.base.contexts import own_modes
from accelfn.base.shards import local
from accelfn.state.beginning import begun

if TYPE_CHECKING:
    from accelfn.state.state import TrainState


def begun_anew(
    before: "TrainState", after: "TrainState", *, kept: Collection[str] = ()
) -> tuple[dict[str, Any], list[Any]]:
    """Return the slots of a state that has other parameters than the one before.

    Those that are still as they begin, begin with what the parameters are now.

    Args:
        before: its slots are the ones that there are.
        after: has other parameters.
        kept: names of slots that stay as they are.

    Returns: the slots by name, and the transforms whose slots would begin otherwise and
        go on, for they have come further.

    Cost: two beginnings of each slot.
    """
    slots, going_on = dict(after.slots), list[Any]()
    with own_modes(before.world.device):
        for owner in before.setup.owners["init"]:
            if owner.name in kept:
                continue
            old, new = (begun(owner, state) for state in (before, after))
            if _are_same(old, new):
                continue
            if _are_same(old, slots.get(owner.name)):
                slots[owner.name] = new
            else:
                going_on.append(owner)
    return slots, going_on


def slots_of(before: "TrainState", after: "TrainState") -> dict[str, Any]:
    """Return the slots of a state that gets other parameters; those of one in training stay."""
    return dict(after.slots) if before.num_tried else begun_anew(before, after)[0]


def as_begun(state: "TrainState") -> list[Any]:
    """Return the transforms whose slots are still as they begin."""
    with own_modes(state.world.device):
        return [
            owner
            for owner in state.setup.owners["init"]
            if _are_same(begun(owner, state), state.slots.get(owner.name))
        ]


def _are_same(one: Any, other: Any) -> bool:
    """Whether two slots hold the same, bit by bit."""
    if tree.outline(one, _kind) != tree.outline(other, _kind):
        return False
    pairs = zip(tree.tree_leaves(one), tree.tree_leaves(other), strict=True)
    return all(_is_same(*pair) for pair in pairs)


def _is_same(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor):
        return bool(one == other)
    a, b = local(one), local(other)
    return a.is_meta or torch.equal(a, b)


def _kind(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        return f"{tuple(leaf.shape)} {leaf.dtype} {leaf.device}"
    return type(leaf).__name__
