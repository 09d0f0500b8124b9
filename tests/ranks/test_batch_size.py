# SPDX-License-Identifier: Apache-2.0
"""Real processes agree on a batch size, wherever one of them runs out of memory."""

import importlib.util

import pytest

from accelfn.testing import simulate
from tests.laws.test_batch_size import PLACES
from tests.processes import RankError, run_ranks
from tests.ranks import programs_of_batch_sizes as programs
from tests.strategies import differences

NO_DEEPSPEED = importlib.util.find_spec("deepspeed") is None


@pytest.mark.ranks(2)
@pytest.mark.parametrize("place", PLACES)
def test_ranks_agree(place):
    """One rank runs out of memory while the other waits: both find what simulated ones do."""
    expected = simulate(2, lambda world: programs.search(world, [16, 5], 16, place))
    for rank, (tried, state) in enumerate(
        run_ranks(2, programs.search, [16, 5], 16, place)
    ):
        assert tried == [16, 8, 4]
        assert differences(expected[rank][1], state) == []


@pytest.mark.ranks(3)
def test_three_ranks_agree():
    """Two ranks run out of memory at sizes of their own."""
    found = run_ranks(3, programs.search, [9, 16, 3], 12, "backward")
    assert [each[0] for each in found] == [[12, 6, 3]] * 3


@pytest.mark.ranks(2)
def test_another_error_is_the_one_that_is_shown():
    """A rank that raises something else ends the other's waiting, and is the culprit."""
    with pytest.raises(RankError, match="ValueError: a bug"):
        run_ranks(2, programs.fail_on_one)


@pytest.mark.ranks(2)
@pytest.mark.skipif(NO_DEEPSPEED, reason="deepspeed is not installed")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ranks_agree_beside_deepspeed(stage):
    """Which talks through torch's default group: wherever one runs out, the other hears of it."""
    for tried in run_ranks(2, programs.by_zero, [16, 5], stage):
        assert tried == [[8, 4]] * 5


@pytest.mark.ranks(2)
def test_torch_s_own_calls_end_too():
    """The default group is the try's own meanwhile, and the world's after it."""
    for tried in run_ranks(2, programs.through_the_default_group, [16, 5]):
        assert tried == [16, 8, 4]


@pytest.mark.ranks(2)
def test_a_search_in_a_search_is_refused():
    """As on simulated ranks: the inner one would need a world that may be given up."""
    with pytest.raises(RankError, match="of another search"):
        run_ranks(2, programs.search_in_a_search)


@pytest.mark.ranks(2)
def test_a_try_begins_when_all_have_joined_it():
    """A rank that runs out of memory at once would break the joining of one that is slow."""
    times = run_ranks(2, programs.join_slowly)
    assert max(joined for joined, _ in times) <= min(began for _, began in times)
