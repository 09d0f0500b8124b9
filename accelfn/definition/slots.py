# SPDX-License-Identifier: Apache-2.0
"""Slots: the entries of a state that are its transforms', or the user's own."""

import copy
import re
from collections.abc import Collection, Mapping
from typing import Any

import torch

from accelfn.base import tree
from accelfn.errors import StateError


def is_slot_name(name: object) -> bool:
    """Return whether a name can stand for a slot, in files too."""
    return isinstance(name, str) and bool(re.fullmatch(r"[A-Za-z0-9_.-]+", name))


def check_own_name(name: str, setup: Collection[str]) -> None:
    """Raise unless a user's own entry can have this name, beside these transforms.

    Raises:
        StateError: it can be no slot's, or is a transform's.
    """
    if not is_slot_name(name):
        msg = (
            f"with_slot({name!r}): expected a name of letters, digits, '.', '_' and"
            " '-'."
        )
        raise StateError(msg)
    if name in setup:
        msg = (
            f"with_slot({name!r}): the transform of that name in the setup owns"
            " this slot."
        )
        raise StateError(msg)


def carried_over(
    slots: Mapping[str, Any], old: Collection[str], new: Collection[str]
) -> dict[str, Any]:
    """Return the slots without those of transforms that are gone.

    Args:
        slots: of transforms, and the user's own.
        old: names of the transforms that there were.
        new: names of those that there are.

    Raises:
        StateError: a new transform has the name of an entry of the user's own.
    """
    taken = sorted((set(new) - set(old)) & slots.keys())
    if taken:
        msg = (
            f"The transforms {taken} would take over entries of the same name that"
            " with_slot made. Give the transforms another name=."
        )
        raise StateError(msg)
    gone = set(old) - set(new)
    return {name: slot for name, slot in slots.items() if name not in gone}


def own_objects(slot: Any) -> Any:
    """Return a slot whose objects, which are no tensors, are copies."""
    return tree.tree_map(
        lambda leaf: leaf if isinstance(leaf, torch.Tensor) else copy.deepcopy(leaf),
        slot,
    )
