# SPDX-License-Identifier: Apache-2.0
"""Each part of a place tells the draws apart that are to differ, and changes no other."""

import ast
from pathlib import Path

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

import accelfn
from tests.laws.draws import ROWS, Place, Row

PACKAGE = Path(accelfn.__file__).parent
TAKES = {"key", "fold"}
PARTS = [field.name for field in attrs.fields(Place)]
few = st.integers(0, 1)
places = st.builds(
    Place,
    seed=st.sampled_from([0, 1, 7, 2**32, 2**32 + 1]),
    name=st.sampled_from(["state", "other", "a", "b"]),
    rank=few,
    step=st.integers(0, 3),
    skipped=st.integers(0, 3),
    micro_batch=few,
    call=few,
    purpose=st.sampled_from(["one", "two"]),
    epoch=st.integers(0, 3),
    index=few,
)


def takers() -> set[str]:
    """Return every function of accelfn that takes a key or a stream."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        pending = [(module, ast.parse(path.read_text()))]
        while pending:
            name, node = pending.pop()
            for child in ast.iter_child_nodes(node):
                inner = name
                named = isinstance(child, (ast.FunctionDef, ast.ClassDef))
                if named and not name.endswith(")"):
                    function = isinstance(child, ast.FunctionDef)
                    inner = f"{name}.{child.name}{'()' * function}"
                match child:
                    case ast.Call(
                        func=ast.Attribute(value=ast.Name("draws"), attr=attr),
                        args=args,
                    ) if attr in TAKES or (attr, args) == ("seeded", []):
                        found.add(name.removesuffix("()"))
                pending.append((inner, child))
    return found


def test_everything_that_draws_has_a_row():
    """What takes a key or a stream is in the table, and what the table names takes one."""
    assert takers() == {place for row in ROWS for place in row.at.split()}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
@given(base=places, other=places)
def test_each_part_tells_apart_or_changes_nothing(
    row: Row, base: Place, other: Place
) -> None:
    """What draws depend on is what the table says: no part less, and no part more."""
    here = row.draws(base)
    for part in PARTS:
        changed = attrs.evolve(base, **{part: getattr(other, part)})
        apart = changed != base and part in row.apart.split()
        found = row.draws(changed)
        assert (found != here) == apart, part
        if apart and isinstance(here, tuple):  # each of several generators' numbers
            assert not {*here} & {*found}, part


def test_no_two_rows_share_draws():
    """At one place, what is drawn for one row is drawn for no other, but for those alike.

    Those are `evaluate` and `predict`; samples, by index or as a stream, of Data or a loader.
    """
    drawn = {row.name: row.draws(Place()) for row in ROWS}
    streams = {each for each in drawn.values() if isinstance(each, tuple)}
    assert len(streams) == 15
    assert len({number for each in streams for number in each}) == sum(
        map(len, streams)
    )
