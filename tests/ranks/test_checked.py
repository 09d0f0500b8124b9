# SPDX-License-Identifier: Apache-2.0
"""Calls on which Gloo waits, aborts or is silently wrong are named errors in a checked world."""

import pytest

import accelfn as af
from tests.processes import run_ranks
from tests.ranks.programs_of_checks import CALLS, meet

pytestmark = pytest.mark.ranks(2)

NAMES = sorted(CALLS)
TURNED = [*NAMES[1:], NAMES[0]]


def meet_all(world: af.World, pairs: list[tuple[str, str]]) -> list[str]:
    """Make pairs of calls, one after the other."""
    return [meet(world, pair) for pair in pairs]


def test_different_calls_are_told_by_real_ranks():
    """Each call against another: both ranks get the error, and go on to the next pair."""
    pairs = list(zip(NAMES, TURNED, strict=True))
    for rank, told in enumerate(run_ranks(2, meet_all, pairs)):
        for text in told:
            assert text.startswith(f"Rank {rank} of 2: the ranks' calls do not match")
            assert "\n  rank 0: " in text
            assert "\n  rank 1: " in text


def test_the_same_calls_give_what_they_give_unchecked():
    """No call is refused that all ranks make, whatever each of them gives."""
    same = [(name, name) for name in NAMES]
    assert run_ranks(2, meet_all, same) == [[""] * len(NAMES)] * 2
