# SPDX-License-Identifier: Apache-2.0
"""The numbers of examples that CI draws are of tests that are there, and are what it draws."""

import importlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.budget import NUMBERS, at_night, budgeted


def test_each_number_is_of_a_test_that_draws():
    """A test that was renamed, or has its own settings, is not listed."""
    for name in NUMBERS:
        module, _, function = name.partition("::")
        test = getattr(importlib.import_module(f"tests.{module}"), function)
        assert hasattr(test, "hypothesis"), name


@pytest.mark.parametrize(
    ("profile", "name", "expected"),
    [
        ("ci", "listed", 7),
        ("ci", "unlisted", 60),
        ("dev", "listed", 25),
        ("deep", "listed", 2000),
    ],
)
def test_ci_draws_as_many(monkeypatch, profile, name, expected):
    """A test that is listed has its number under CI's profile, and the profile's else."""
    monkeypatch.setitem(NUMBERS, "kit.test_budget::listed", 7)
    usual, drawn = settings.get_current_profile_name(), []
    try:
        settings.load_profile(profile)

        @given(st.integers())
        def test(number):
            drawn.append(number)

        test.__module__, test.__name__ = "tests.kit.test_budget", name
        budgeted(test)
        budgeted(test)  # of a test with several parameters, for each
        assert at_night() == (profile == "deep")
        test()
    finally:
        settings.load_profile(usual)
    assert expected == len(drawn)
