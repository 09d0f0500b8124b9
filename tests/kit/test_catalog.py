# SPDX-License-Identifier: Apache-2.0
"""The catalog has every public transform, and is right about each of them."""

import pickle

import attrs
import pytest
from hypothesis import find, given
from hypothesis import strategies as st

import accelfn as af
from accelfn.testing import assert_states_equal
from accelfn.testing.strategies import programs
from tests.catalog import IDENTITY_OPTIONS, public_transforms
from tests.internals import CATALOG, FIELDS, Row, row_of

KEPT = {"name", "within", "layers", "neighbours", "outer", "regions"}
"""Options that keep their default, because they depend on the model."""
OPTIONS = [
    (row, field.name)
    for row in CATALOG
    for field in attrs.fields(row.cls)
    if field.name not in KEPT
]


def test_every_public_transform_has_one_row():
    """No public transform escapes the laws that are drawn from the catalog."""
    assert public_transforms() == {row.cls for row in CATALOG}
    assert len({row.cls for row in CATALOG}) == len(CATALOG)


@pytest.mark.parametrize(("row", "option"), OPTIONS, ids=repr)
def test_every_option_is_drawn(row, option):
    """For each option of a transform some value is drawn that is not its default."""
    default = getattr(attrs.fields(row.cls), option).default
    drawn = find(row.transforms(), lambda each: getattr(each, option) != default)
    assert type(drawn) is row.cls


@given(data=st.data(), row=st.sampled_from(CATALOG))
def test_what_is_drawn_is_a_value(data, row):
    """A drawn transform prints as code, and is equal to what pickle makes of it."""
    drawn = data.draw(row_of(row.cls).transforms())
    assert drawn == eval(repr(drawn), {"af": af})  # noqa: S307 - what repr promises
    assert drawn == pickle.loads(pickle.dumps(drawn))  # noqa: S301


@given(
    data=st.data(),
    pair=st.lists(st.sampled_from(CATALOG), min_size=2, max_size=2, unique=True),
)
def test_two_compose_unless_one_avoids_the_other(data, pair):
    """A chain of two is refused just where the catalog says that one avoids the other."""
    one, two = (attrs.evolve(row, value=data.draw(row.transforms())) for row in pair)
    if one.composes([two]):
        assert list(af.chain(one.value, two.value)) == [one.value, two.value]
    else:
        with pytest.raises(af.errors.CompositionError):
            af.chain(one.value, two.value)


@given(data=st.data(), row=st.sampled_from(CATALOG), field=st.sampled_from(FIELDS))
def test_drawn_beside_a_field_it_stands_beside_it(data, row, field):
    """Drawn to stand beside a field, a transform avoids it only if every one of it does."""
    other = Row(type("Other", (), {field: None}), st.just({}))
    drawn = attrs.evolve(row, value=data.draw(row.transforms([other])))
    assert (field in drawn.avoids) == (field in row.avoids)


@pytest.mark.slow
@pytest.mark.parametrize(
    "transform",
    [kind(**options) for kind, options in IDENTITY_OPTIONS.items()],
    ids=repr,
)
@given(data=st.data())
def test_neutral_options_change_nothing(data, transform):
    """At its neutral options a transform leaves training as it is, bitwise."""
    plain = data.draw(programs(setup=af.chain()))
    neutral = attrs.evolve(plain, setup=transform)
    world = af.World.single(device="cpu")
    without_slot = neutral(world).with_setup(af.chain())
    assert_states_equal(plain(world), without_slot)


@pytest.mark.parametrize("other", [af.chain, int, af.ema(0.5)])
def test_what_is_not_in_the_catalog_is_refused(other):
    """Only a class of the catalog has a row; the message says what to give instead."""
    with pytest.raises(af.errors.ArgumentError, match="pass a transform with the op"):
        row_of(other)
