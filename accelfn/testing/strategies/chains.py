# SPDX-License-Identifier: Apache-2.0
"""Chains of the catalog's transforms, in any order, that compose by construction."""

from collections.abc import Iterable, Sequence
from typing import Any

import attrs
from hypothesis import strategies as st

from accelfn.definition.fields import FIELDS, has_field
from accelfn.definition.transform import Transform, chain, is_transform
from accelfn.errors import ArgumentError
from accelfn.testing.catalog import CATALOG, Row, fields_of, row_of


def chains(
    *,
    include: Iterable[Any] = (),
    exclude: Iterable[type] = (),
    field: str | None = None,
    reduced: bool = False,
    max_size: int = len(CATALOG),
) -> st.SearchStrategy[chain]:
    """Draw chains of public transforms, with options; they shrink to the shortest.

    Args:
        include: what every chain has: classes of the catalog, whose options are drawn, and
            transforms of your own.
        exclude: classes of the catalog that no chain has.
        field: draw only transforms that have a say in this, as "grads"; what is included
            is not held to it.
        reduced: every chain says how gradients cross ranks, so that a world of several can
            train with it.
        max_size: how many transforms are drawn at most, beside those that must be there.

    Raises:
        ArgumentError: something included is no transform, or there is no such field.

    Example:
        >>> around_mine = chains(include=[af.ema(0.5)], exclude=[af.local_sgd])
    """
    if field is not None and field not in FIELDS:
        msg = f"chains(field={field!r}): expected one of {', '.join(FIELDS)}."
        raise ArgumentError(msg)
    musts = [_must(each) for each in include]
    present = {type(each.value) if each.value else each.row.cls for each in musts}
    away = {row_of(cls) for cls in exclude}
    free = [row for row in CATALOG if row not in away and row.cls not in present]
    reducers = [row for row in free if _reduces(row)] if reduced else []
    drawn = [
        _Place(row, field=field) for row in free if field is None or field in row.fields
    ]
    return _chains(musts, reducers, drawn, max_size)


@attrs.frozen(eq=False)
class _Place:
    """One transform of a chain that is being drawn: a value, or a row to draw it from.

    What is drawn has a say in `field`, if one is named, which may depend on its options.
    """

    row: Row
    value: Transform | None = None
    field: str | None = None

    def composes(self, others: Sequence["_Place"]) -> bool:
        """Whether it can stand beside others, if their options allow it."""
        mine = self.row.avoids(self.value)
        return not any(
            mine & other.row.fields
            or other.row.avoids(other.value) & self.row.fields
            or (self.row.cls is other.row.cls)
            for other in others
        )


def _must(each: Any) -> _Place:
    if isinstance(each, type):
        return _Place(row_of(each))
    if not is_transform(each) or isinstance(each, chain):
        msg = f"chains(include=[{each!r}]): expected a transform, or a class of one."
        raise ArgumentError(msg)
    known = [row for row in CATALOG if row.cls is type(each)]
    return _Place(known[0] if known else Row(type(each), st.just({})), each)


def _reduces(row: Row) -> bool:
    return bool({"engine", "reduce"} & row.fields)


@st.composite
def _chains(
    draw: st.DrawFn,
    musts: Sequence[_Place],
    reducers: Sequence[Row],
    rows: Sequence[_Place],
    max_size: int,
) -> chain:
    chosen = list(musts)
    able = [row for row in reducers if _Place(row).composes(chosen)]
    if able:
        chosen.append(_Place(draw(st.sampled_from(able))))
    fixed = len(chosen)
    order = draw(st.permutations([*chosen, *rows]))
    for place in order:
        wanted = place not in chosen and draw(st.booleans())
        if wanted and len(chosen) < fixed + max_size and place.composes(chosen):
            chosen.append(place)
    return chain(*[_made(draw, place, chosen) for place in order if place in chosen])


def _made(draw: st.DrawFn, place: _Place, places: Sequence[_Place]) -> Transform:
    if place.value is not None:
        return place.value
    beside = {
        field
        for other in places
        if other is not place
        for field in fields_of(other.row.cls)
    }
    field, drawn = place.field, place.row.transforms(beside)
    if field is not None:
        drawn = drawn.filter(lambda made: has_field(made, field))
    return draw(drawn)
