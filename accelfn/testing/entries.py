# SPDX-License-Identifier: Apache-2.0
"""All that a state holds, as a flat table by path; and the first difference of two tables."""

from collections.abc import Mapping
from typing import Any, cast

import torch

from accelfn.state import TrainState


def entries(state: TrainState) -> dict[str, Any]:
    """Return everything that is saved of a state, copied, by path."""
    found: dict[str, Any] = {}
    for field in ("params", "buffers", "opt_state", "slots"):
        _walk(field, getattr(state, field), found)
    for field in ("step", "cursor", "seed"):
        found[field] = getattr(state, field)
    return found


def _walk(path: str, value: Any, found: dict[str, Any]) -> None:
    if isinstance(value, torch.Tensor):
        found[path] = value.detach().clone()
    elif isinstance(value, Mapping):
        for key, inside in cast("Mapping[Any, Any]", value).items():
            _walk(f"{path}[{key!r}]", inside, found)
    elif isinstance(value, (list, tuple)):
        for place, inside in enumerate(cast("list[Any]", value)):
            _walk(f"{path}[{place}]", inside, found)
    else:
        found[path] = value


def first_difference(one: Mapping[str, Any], two: Mapping[str, Any]) -> str | None:
    """Return the first path at which two tables differ, in a bit, with both values."""
    for path in [*one, *(path for path in two if path not in one)]:
        if path not in one or path not in two:
            return f"{path} is in one of them only."
        said = difference(one[path], two[path])
        if said:
            return f"{path}: {said}"
    return None


def difference(one: Any, two: Any) -> str | None:
    """Return how two leaves differ, or None if they are the same to the bit."""
    if not isinstance(one, torch.Tensor) or not isinstance(two, torch.Tensor):
        if type(one) is not type(two):
            return f"{one!r} and {two!r}"
        opaque = type(one).__eq__ is object.__eq__  # nothing in it can be compared
        same = opaque or one == two or repr(one) == repr(two)
        return None if same else f"{one!r} and {two!r}"
    for what in ("dtype", "shape"):
        mine, its = getattr(one, what), getattr(two, what)
        if mine != its:
            return f"{what} {mine} and {its}"
    differing = (one != two) & ~(one.isnan() & two.isnan())
    if not bool(differing.any()):
        return None
    where = tuple(int(i) for i in differing.nonzero()[0])
    return (
        f"{int(differing.sum())} of {one.numel()} elements differ, the first at"
        f" {list(where)}: {one[where].item()!r} and {two[where].item()!r}"
    )
