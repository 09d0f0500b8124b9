# SPDX-License-Identifier: Apache-2.0
"""The catalog has every public transform, and is right about each of them."""

import pickle

import attrs
import pytest
from hypothesis import find, given
from hypothesis import strategies as st

import accelfn as af
from accelfn.testing import assert_states_equal, catalog
from accelfn.testing.strategies import programs
from tests.internals import CATALOG, FIELDS, row_of
from tests.internals import catalog_fields_of as fields_of

rows = pytest.mark.parametrize("row", CATALOG, ids=repr)
OPTIONS = [
    (row, field.name)
    for row in CATALOG
    for field in attrs.fields(row.cls)
    if field.name not in {"name", *row.not_drawn}
]


def test_every_public_transform_has_one_row():
    """No public transform escapes the laws that are drawn from the catalog."""
    assert catalog.public_transforms() == {row.cls for row in CATALOG}
    assert len({row.cls for row in CATALOG}) == len(CATALOG)


def test_a_transform_that_is_made_public_is_missed(monkeypatch):
    """A new public transform without a row is noticed; `chain` and errors are none."""

    @af.transform
    class Unlisted:
        def loss(self, loss_fn, slot, update):
            return loss_fn, slot

    public = [*dir(af), "Unlisted"]
    monkeypatch.setattr(af, "Unlisted", Unlisted, raising=False)
    monkeypatch.setattr(af, "__dir__", lambda: public)
    missing = catalog.public_transforms() - {row.cls for row in CATALOG}
    assert missing == {Unlisted}


@pytest.mark.parametrize(("row", "option"), OPTIONS, ids=repr)
def test_every_option_is_drawn(row, option):
    """For each option of a transform some value is drawn that is not its default."""
    default = getattr(attrs.fields(row.cls), option).default
    drawn = find(row.transforms(), lambda each: getattr(each, option) != default)
    assert type(drawn) is row.cls


@given(data=st.data(), row=st.sampled_from(CATALOG))
def test_what_is_drawn_is_a_value(data, row):
    """A drawn transform prints as code, and is equal to what pickle makes of it."""
    drawn = data.draw(catalog.transforms(row.cls))
    assert drawn == eval(repr(drawn), {"af": af})  # noqa: S307 - what repr promises
    assert drawn == pickle.loads(pickle.dumps(drawn))  # noqa: S301


@given(
    data=st.data(),
    pair=st.lists(st.sampled_from(CATALOG), min_size=2, max_size=2, unique=True),
)
def test_two_compose_unless_one_avoids_the_other(data, pair):
    """A chain of two is refused just where the catalog says that one avoids the other."""
    one, two = (data.draw(row.transforms()) for row in pair)
    apart = (pair[0].avoids(one) & fields_of(two)) or (
        pair[1].avoids(two) & fields_of(one)
    )
    if apart:
        with pytest.raises(af.errors.CompositionError):
            af.chain(one, two)
    else:
        assert list(af.chain(one, two)) == [one, two]


@given(data=st.data(), row=st.sampled_from(CATALOG), field=st.sampled_from(FIELDS))
def test_drawn_beside_a_field_it_stands_beside_it(data, row, field):
    """Drawn to stand beside a field, a transform avoids it only if every one of it does."""
    drawn = data.draw(row.transforms(methods=[field]))
    assert (field in row.avoids(drawn)) == (field in row.avoids())


@pytest.mark.slow
@pytest.mark.parametrize(
    "row", [row for row in CATALOG if row.identity_options is not None], ids=repr
)
@given(data=st.data())
def test_neutral_options_change_nothing(data, row):
    """At its neutral options a transform leaves training as it is, bitwise."""
    plain = data.draw(programs(setup=af.chain()))
    neutral = attrs.evolve(plain, setup=row.cls(**row.identity_options))
    world = af.World.single(device="cpu")
    without_slot = neutral(world).with_setup(af.chain())
    assert_states_equal(plain(world), without_slot)


@rows
def test_laws_given_up_are_the_transforms_own(row):
    """What a row gives up is what the chain of that transform gives up."""
    one = find(row.transforms(), lambda _: True)
    assert dict(row.gives_up) == af.chain(one).gives_up()


@pytest.mark.parametrize("other", [af.chain, int, af.ema(0.5)])
def test_what_is_not_in_the_catalog_is_refused(other):
    """Only a class of the catalog has a row; the message says what to give instead."""
    with pytest.raises(af.errors.ArgumentError, match="pass a transform with the op"):
        row_of(other)
