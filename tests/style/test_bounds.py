# SPDX-License-Identifier: Apache-2.0
"""Test that no measure of code size or language is above its bound, and that checks work."""

import pytest

from tests.style.__main__ import SUBJECT, find_faults
from tests.style.bounds import bounds, measure_step, measure_texts


def test_nothing_is_above_its_bound() -> None:
    """If this fails, remove as much as you add, or raise a bound in bounds.txt for a feature.

    `python -m tests.style.bounds` lowers the bounds to the measured values.
    """
    assert not find_faults()
    found, most = measure_step(), bounds()
    assert {*found, *measure_texts()} == {*most}
    above = {
        name: (value, most[name]) for name, value in found.items() if value > most[name]
    }
    assert above == {}, "measured, and the bound"


@pytest.mark.parametrize(
    ("subject", "good"),
    [
        ("checkpoint: reject manifests with duplicate keys", True),
        ("Reject manifests with duplicate keys", False),
        ("checkpoint: Reject manifests", False),
        (f"checkpoint: {'x' * 61}", False),
    ],
)
def test_subjects_of_commits(subject: str, good: bool) -> None:
    """A subject has an area and a verb, and at most 72 characters."""
    assert bool(SUBJECT.match(subject)) == good
