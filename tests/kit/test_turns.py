# SPDX-License-Identifier: Apache-2.0
"""How CI runs tests: slow ones take turns, laws have their number of examples, and files."""

import importlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.budget import NUMBERS
from tests.turns import waiting

UNITS = st.dictionaries(
    st.text("abc", min_size=1, max_size=3), st.sampled_from([None, *"vwxyz"])
)


@given(units=UNITS, n=st.integers(1, 6))
def test_each_slow_test_has_one_turn_of_n(units: dict[str, str | None], n: int) -> None:
    """A fast one has each; what goes together does; and no turn is much longer than another."""
    run = [units.keys() - waiting(units, f"{k}/{n}") for k in range(n)]
    for test, unit in units.items():
        assert sum(test in each for each in run) == (n if unit is None else 1)
    sizes = [len({units[test] for test in each} - {None}) for each in run]
    assert max(sizes) - min(sizes) <= 1
    for each in run:
        slow = {units[test] for test in each} - {None}
        assert all(test in each for test, unit in units.items() if unit in slow)


def test_each_number_is_of_a_test_that_draws():
    """A test that was renamed, or has its own settings, is not listed."""
    for name in NUMBERS:
        module, _, function = name.partition("::")
        test = getattr(importlib.import_module(f"tests.{module}"), function)
        assert hasattr(test, "hypothesis"), name


def test_tests_have_their_group(request):
    """pytest-xdist 3.8 groups by a name's end, which pytest 9.2 does not let it write."""
    if not getattr(request.config.option, "loadgroup", False):
        pytest.skip("nothing runs beside it")
    assert request.node.nodeid.endswith("@tests/kit/test_turns.py"), (
        "install what constraints.txt pins"
    )
