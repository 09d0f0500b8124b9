# SPDX-License-Identifier: Apache-2.0
"""Arguments are refused by name, with the value that was given."""

import math

import attrs
import numpy as np
import pytest

from accelfn.errors import ArgumentError
from tests.internals import check_integer, integer, is_integer, is_number, truth


@attrs.frozen
class Bag:
    count: int = attrs.field(default=1, validator=integer(1, "a number of beans"))
    is_open: bool = attrs.field(default=True, validator=truth(within="shop."))


NO_INTEGERS = [True, False, 1.0, "1", None, math.inf, np.int64(1), [1]]


@pytest.mark.parametrize("value", NO_INTEGERS)
def test_what_is_no_integer(value):
    """Truths, numbers that happen to be whole, and text are none."""
    assert not is_integer(value)
    with pytest.raises(ArgumentError, match="expected an integer, 0 or more") as caught:
        check_integer("af.f", "n", value, 0)
    assert f"af.f(n={value!r})" in str(caught.value)


def test_the_least_integer():
    """The bound itself is in; without one, all integers are."""
    assert is_integer(-3)
    assert is_integer(2, 2)
    assert not is_integer(1, 2)
    check_integer("af.f", "n", 2, 2)
    with pytest.raises(ArgumentError, match=r"af\.f\(n=1\): .* 2 or more"):
        check_integer("af.f", "n", 1, 2)


@pytest.mark.parametrize(("value", "number"), [(1, 1), (0.5, 1), (True, 0), ("1", 0)])
def test_numbers(value, number):
    """An integer is a number, a truth is none."""
    assert is_number(value) == bool(number)


def test_fields():
    """A record's fields are refused in the words of the user's code."""
    assert Bag(count=3, is_open=False) == Bag(3, False)  # noqa: FBT003 - a record of both
    words = r"af\.Bag\(count=0\): expected a number of beans: an integer, 1 or more\."
    with pytest.raises(ArgumentError, match=words):
        Bag(count=0)
    words = r"shop\.Bag\(is_open=1\): expected True or False\."
    with pytest.raises(ArgumentError, match=words):
        Bag(is_open=1)
