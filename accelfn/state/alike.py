# SPDX-License-Identifier: Apache-2.0
"""Whether ranks hold the same state: what each says of it, a row a tensor or a number."""

from collections.abc import Collection, Iterator, Mapping
from types import NoneType
from typing import Any, cast

import torch

from accelfn.base.codec import has_state
from accelfn.base.pending import Pending
from accelfn.collectives import check_rows
from accelfn.collectives.calls import shown
from accelfn.collectives.replicas import sums_of
from accelfn.world import World

_LABEL = "replicas agree"


def check_alike(
    fields: Mapping[str, Any], world: World, *, is_split: bool, advice: str
) -> None:
    """Raise, on all ranks, unless they hold the same fields of a state, bit by bit.

    Args:
        fields: in the order in which they are compared.
        world: whose ranks hold them.
        is_split: whether ranks hold parts, of which copies are compared.
        advice: how the error ends.

    Cost: a few passes over every tensor, and two gathers, of a line for each.

    Raises:
        ReplicaMismatchError: they do not; the first difference is named, a row a rank.
    """
    if world.size == 1:
        return
    rows = {name: row for field in fields for name, row in _rows(field, fields[field])}
    if is_split:  # parts are summed up together
        shapes = {n: shown(r) if _is_tensor(r) else r for n, r in rows.items()}
        check_rows(shapes, world, label=_LABEL, advice=advice)
    check_rows(_summed(rows, world), world, label=_LABEL, advice=advice)


def shared_slots(
    slots: Mapping[str, Any], own: Collection[tuple[str, str]]
) -> dict[str, Any]:
    """Return slots without the entries that are each rank's own, named by slot and in it."""
    return {name: _shared(name, slot, own) for name, slot in slots.items()}


def _summed(rows: Mapping[str, Any], world: World) -> dict[str, str]:
    """Return rows in which tensors are told by their shapes and checksums."""
    tensors = {name: row for name, row in rows.items() if _is_tensor(row)}
    if not tensors:
        return dict(rows)
    sums = sums_of(tensors.values(), world, label=_LABEL).tolist()
    named = dict(zip(tensors, sums, strict=True))
    return {
        name: f"{shown(row)}, checksum {named[name]}" if name in named else row
        for name, row in rows.items()
    }


def _is_tensor(row: Any) -> bool:
    return isinstance(row, torch.Tensor)


def _shared(name: str, slot: Any, own: Collection[tuple[str, str]]) -> Any:
    """Return a slot without the entries that are each rank's own."""
    if not isinstance(slot, Mapping) or not any(name == owner for owner, _ in own):
        return slot
    return {entry: each for entry, each in slot.items() if (name, entry) not in own}


def _rows(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what there is at and below a place: a tensor, or what ranks say of it."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value).items()
        for key, inner in items:
            yield from _rows(f"{path}[{key!r}]", inner)
    elif isinstance(value, (list, tuple)):
        for place, inner in enumerate(cast("list[Any]", value)):
            yield from _rows(f"{path}[{place}]", inner)
    elif isinstance(value, Pending):
        yield from _rows(path, value.wait())
    elif has_state(value):
        yield from _rows(path, value.state_dict())
    else:  # of an object of any other kind, which no checkpoint would have, its kind
        plain = isinstance(value, (str, int, float, complex, bytes, NoneType))
        yield path, repr(value) if plain else type(value).__name__
