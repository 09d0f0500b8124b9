# SPDX-License-Identifier: Apache-2.0
"""All that a state holds, as a flat table by path; and the first difference of two tables."""

from collections.abc import Mapping
from typing import Any

import torch

from accelfn.base.shards import is_shard, local
from accelfn.collectives import wholes
from accelfn.state.state import TrainState
from accelfn.testing.comparing.differences import Comparison, leaves
from accelfn.testing.comparing.states import SAVED

_BITWISE = Comparison(bitwise=True, sides=("one", "the other"))


def entries(state: TrainState, *, gather: bool = False) -> dict[str, Any]:
    """Return everything that is saved of a state, copied, by path.

    Of what is split that is this rank's part, or where all ranks ask for it, the whole.
    """
    found = {
        path: leaf
        for field in SAVED
        for path, leaf in leaves(field, getattr(state, field))
    }
    if gather:
        parts = {path: leaf for path, leaf in found.items() if is_shard(leaf)}
        found |= wholes(parts, state.world, label="compare states")
    return {path: kept(leaf) for path, leaf in found.items()}


def first_difference(one: Mapping[str, Any], two: Mapping[str, Any]) -> str | None:
    """Return the first path at which two tables differ, in a bit, with both values."""
    found = _BITWISE.by_name(one, two)
    return str(next(iter(found.values()))[0]) if found else None


def kept(leaf: Any) -> Any:
    """Return a leaf that later updates leave alone; of what cannot be compared, its type."""
    if isinstance(leaf, torch.Tensor):
        return local(leaf).detach().clone()
    opaque = type(leaf).__eq__ is object.__eq__ and leaf is not None
    return type(leaf) if opaque else leaf
