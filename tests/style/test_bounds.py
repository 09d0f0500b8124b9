# SPDX-License-Identifier: Apache-2.0
"""The package, the tests and the texts do not grow."""

from tests.style.bounds import bounds, measures


def test_nothing_is_above_its_bound() -> None:
    """Take away elsewhere what you add, or raise a bound in bounds.txt for a new feature.

    `python -m tests.style.bounds` lowers the bounds.
    """
    found, most = measures(), bounds()
    assert found.keys() == most.keys()
    above = {
        name: (value, most[name]) for name, value in found.items() if value > most[name]
    }
    assert above == {}, "measured, and the bound"
