# SPDX-License-Identifier: Apache-2.0
"""Slots: the entries of a state that are its transforms', or the user's own."""

import copy
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, cast

import torch

from accelfn.base import tree
from accelfn.base.advice import advise
from accelfn.base.sharing import is_within
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


def say_what_follows(name: str, slot: Any, state: Any) -> None:
    """Warn of an entry that is to keep what a state holds, and has the state's own tensors."""
    if _follows(slot, state):
        advise(
            f"with_slot({name!r}) was given tensors of the state itself, which the next updates"
            " write into: the entry follows the training. To keep what they are now, give"
            " copies, {name: each.clone() for name, each in state.params.items()} say."
        )


def check_copied(
    owner: Any, slot: Any, state: Any, *grads: Mapping[str, torch.Tensor]
) -> None:
    """Raise if the slot of a transform has tensors that updates write into.

    Args:
        owner: the transform.
        slot: what it returned.
        state: whose parameters, buffers and optimizer state are looked at.
        grads: of the update.

    Raises:
        StateError: it has.
    """
    names = state.definition.skeleton.trainable
    held: list[tuple[str, Mapping[str, Any]]] = [
        ("state.params", {name: state.params[name] for name in names}),
        ("state.buffers", state.buffers),
        ("state.opt_state", state.opt_state),
        *(("grads.tensors", each) for each in grads),
    ]
    for what, tensors in held:
        if not _follows(slot, tensors):
            continue
        name = next(name for name, each in tensors.items() if _follows(slot, each))
        msg = (
            f"{owner!r} returned a slot that has {what}[{name!r}] itself, not a copy. The"
            " next updates write into this tensor, so the slot would change with it. Return"
            f" copies: {{name: each.clone() for name, each in {what}.items()}}."
        )
        raise StateError(msg)


def _follows(slot: Any, state: Any) -> bool:
    is_held = is_within(tree.tensor_leaves(state))
    return any(map(is_held, _tensors(slot)))


def _tensors(slot: Any, depth: int = 4) -> Iterator[torch.Tensor]:
    if isinstance(slot, torch.Tensor):
        yield slot
    elif depth and isinstance(slot, (Mapping, list, tuple)):
        inside = cast("Any", slot.values() if isinstance(slot, Mapping) else slot)
        for each in inside:
            yield from _tensors(each, depth - 1)


def own_objects(slot: Any) -> Any:
    """Return a slot whose objects, which are no tensors, are copies."""
    return tree.tree_map(
        lambda leaf: leaf if isinstance(leaf, torch.Tensor) else copy.deepcopy(leaf),
        slot,
    )
