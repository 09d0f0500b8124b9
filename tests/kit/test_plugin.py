# SPDX-License-Identifier: Apache-2.0
"""The pytest plugin: a marked test runs on every rank, and no other test pays for it."""

import sys

import pytest
from hypothesis import settings

from tests.internals import (
    comparing,  # noqa: F401 - else each inner run imports it again
    register_profiles,
)

pytest_plugins = ["pytester"]

HEAD = """
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, strategies as st
import accelfn as af
from accelfn.testing import Leave, Raise, simulate

def summed(world, number):
    total = torch.tensor(float(number))
    dist.all_reduce(total, group=world.group)
    return total.item()
"""


@pytest.fixture
def run(pytester, monkeypatch):
    """Run pytest on a test file of this body, in this process."""
    # one of the same length, written within a second, would be taken for the one before
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def run(body: str, *options: str, below: str = ".") -> pytest.RunResult:
        (pytester.path / below).mkdir(exist_ok=True)
        pytester.makepyfile(**{f"{below}/test_of_a_user": HEAD + body})
        # the order is looked at
        plugins = "-p", "no:cacheprovider", "-p", "no:randomly"
        return pytester.runpytest_inprocess(*plugins, *options)

    return run


DEFAULT = """
@pytest.mark.simulated
def test_default_sizes(world):
    assert world.size in (1, 2, 4) and summed(world, 1) == world.size
"""


class TestMarker:
    """`@pytest.mark.simulated`."""

    def test_every_rank_of_every_size(self, run, tmp_path):
        """The test runs once on every rank of a world of each size, by default 1, 2 and 4."""
        body = f"""
@pytest.mark.simulated(1, 3)
def test_place(world):
    with open({str(tmp_path / "places")!r}, "a") as file:
        file.write(f"{{world.rank}} of {{world.size}}\\n")
    assert summed(world, 1) == world.size
"""
        run(body + DEFAULT, "--strict-markers").assert_outcomes(passed=5)
        places = (tmp_path / "places").read_text().splitlines()
        assert places == ["0 of 1", "0 of 3", "1 of 3", "2 of 3"]

    def test_beside_parameters_fixtures_and_classes(self, run):
        """Parameters, fixtures and methods are as in any other test; ranks share them."""
        run(
            """
class TestSum:
    @pytest.mark.parametrize("number", [1, 2])
    @pytest.mark.simulated(2)
    def test_sum(self, number, tmp_path, world):
        (tmp_path / str(world.rank)).touch()
        assert summed(world, number) == 2 * number
        assert len(list(tmp_path.iterdir())) == 2
"""
        ).assert_outcomes(passed=2)

    def test_a_failure_says_how_to_repeat_it(self, run):
        """A failing test shows the test, the call of simulate, and the last collectives."""
        result = run(
            """
@pytest.mark.simulated(2, schedule=[1], seed=3)
def test_wrong(world):
    for number in range(12):
        summed(world, number)
    assert summed(world, 1) == 3
"""
        )
        result.assert_outcomes(failed=1)
        result.stdout.fnmatch_lines(
            [
                ">*assert summed(world, 1) == 3",
                "E*In rank * of a simulated world.*",
                "*simulated world call*",
                "To repeat the test: pytest '*::test_wrong[[]2ranks]'",
                "*accelfn.testing.simulate(2, test_wrong, schedule=[[]1], seed=3)",
                "The last of 13 completed collectives:",
                *["  all_reduce SUM *, 4 bytes (*.py:*)"] * 10,
            ],
            consecutive=False,
        )
        shown = [line for line in result.outlines if line.startswith("  all_reduce")]
        assert len(shown) == 10
        result.stdout.no_fnmatch_line("*pytest_accelfn.py:*")

    def test_a_passing_test_shows_nothing(self, run):
        """There is no section without a failure, and none of a test that is skipped."""
        result = run(
            """
@pytest.mark.simulated(2)
def test_right(world):
    if summed(world, 1) == 2:
        pytest.skip("not here")

def test_wrong():
    raise KeyError
""",
            "-rA",
        )
        result.assert_outcomes(skipped=1, failed=1)
        result.stdout.no_fnmatch_line("*simulated world call*")

    def test_under_given(self, run):
        """Each example has a world of its own, is drawn before it, and shrinks."""
        result = run(
            """
worlds = []

class TestSum:
    @pytest.mark.simulated(2, 4)
    @given(number=st.integers(0, 100))
    def test_sum(self, world, number):
        worlds.append(world)
        assert summed(world, number) == world.size * number
        assert world.size == 2 or number < 7

def test_worlds():
    assert len({id(world) for world in worlds}) == len(worlds) >= 40
""",
            "--hypothesis-seed=1",
        )
        result.assert_outcomes(passed=2, failed=1)
        result.stdout.fnmatch_lines(
            [
                "*number=7,*",
                "To repeat the test: pytest '*::TestSum::test_sum[[]4ranks]'",
                "*simulate(4, TestSum.test_sum)",
                "The last of 1 completed collectives*",
            ]
        )

    def test_options_reach_the_world(self, run):
        """Faults happen, and the seed is that of the ranks' generators."""
        run(
            """
@pytest.mark.simulated(2, faults=[Raise(1, error=KeyError)])
def test_fault(world):
    if world.rank == 1:
        with pytest.raises(KeyError):
            summed(world, 1)
        summed(world, 1)
    else:
        assert summed(world, 1) == 2

@pytest.mark.simulated(2, seed=5)
def test_seed(world):
    drawn = torch.rand(()).item()
    with torch.random.fork_rng(devices=[]):
        run = simulate(2, lambda inner: torch.rand(()).item(), seed=5)
    assert drawn == run[world.rank]
"""
        ).assert_outcomes(passed=2)

    def test_ranks_that_part_are_reported(self, run):
        """A dead-lock fails the test at once, with a row for each rank."""
        result = run(
            """
@pytest.mark.simulated(2)
def test_parted(world):
    if world.is_main:
        summed(world, 1)
"""
        )
        result.assert_outcomes(failed=1)
        result.stdout.fnmatch_lines(
            ["E*DeadlockError*", "E*rank 0: in #0 all_reduce*", "E*rank 1: returned"]
        )
        result.stdout.no_fnmatch_line("Of 0 collectives*")

    @pytest.mark.parametrize(
        ("mark", "says"),
        [
            (
                "simulated(0)",
                "*numbers of ranks*faults, schedule, seed, sums*0.",
            ),
            ("simulated('2')", "*not '2'."),
            ("simulated(True)", "*not True."),
            ("simulated(2, size=4)", "*not 'size'."),
        ],
    )
    def test_wrong_arguments(self, run, mark, says):
        """A size that is none, or an unknown option, is refused when tests are collected."""
        result = run(f"@pytest.mark.{mark}\ndef test_it(world): ...\n")
        result.assert_outcomes(errors=1)
        result.stdout.fnmatch_lines([says])

    def test_without_world(self, run):
        """A marked test without the argument `world` is refused, and told to take it."""
        result = run("@pytest.mark.simulated\ndef test_it(): ...\n")
        result.assert_outcomes(errors=1)
        result.stdout.fnmatch_lines(["*::test_it*takes the argument `world`*"])

    def test_other_tests_are_left_alone(self, run):
        """A test without the marker has its own `world`, whatever that is."""
        run(
            """
@pytest.fixture
def world():
    return "mine"

def test_mine(world):
    assert world == "mine"
"""
        ).assert_outcomes(passed=1)


class TestSnapshot:
    """`collectives_snapshot` and `--update-collectives`."""

    BODY = """
def test_sums(collectives_snapshot):
    run = simulate(2, lambda world: [summed(world, 1) for _ in range({times})])
    collectives_snapshot(run, "sums.txt")
"""

    def test_written_and_compared(self, run, pytester):
        """The option writes the file beside the test; without it, a change is refused."""
        once, twice = (self.BODY.format(times=times) for times in (1, 2))
        file = pytester.path / "below" / "sums.txt"
        run(once, below="below").assert_outcomes(failed=1)
        assert not file.exists()
        run(once, "--update-collectives", below="below").assert_outcomes(passed=1)
        assert "all_reduce SUM, 4 bytes" in file.read_text()
        assert [*pytester.path.glob("*.txt")] == []
        run(once, below="below").assert_outcomes(passed=1)
        changed = run(twice, below="below")
        changed.assert_outcomes(failed=1)
        changed.stdout.fnmatch_lines(["E*all_reduce SUM, 4 bytes*2 times*"])


class TestProfiles:
    """Hypothesis's profiles dev, ci and deep."""

    def test_what_they_are(self):
        """No profile has a deadline; ci draws the same each time, and deep thousands."""
        names = ("dev", "ci", "deep")
        dev, ci, deep = (settings.get_profile(name) for name in names)
        assert {dev.deadline, ci.deadline, deep.deadline} == {None}
        assert dev.max_examples < ci.max_examples < 1000 < deep.max_examples
        same = [(each.derandomize, each.print_blob) for each in (dev, ci, deep)]
        assert same[1:] == [(True, True), (False, same[2][1])]

    def test_a_profile_that_exists_stays(self):
        """Registering leaves profiles of these names as they are, unless told otherwise."""
        before = settings.get_profile("dev")
        try:
            settings.register_profile("dev", max_examples=7)
            register_profiles()
            assert settings.get_profile("dev").max_examples == 7
            register_profiles(replace=True)
            assert settings.get_profile("dev").max_examples == 25
        finally:
            settings.register_profile("dev", before)

    @pytest.mark.parametrize(
        ("conftest", "profile", "shown"),
        [
            ("", "deep", "'deep' -> *max_examples=2000*"),
            (
                "import hypothesis as h; h.settings.register_profile('dev', max_examples=7)",
                "dev",
                "'dev' -> *max_examples=7*",
            ),
        ],
        ids=["the plugin's", "a conftest's"],
    )
    def test_by_the_command_line(self, pytester, conftest, profile, shown):
        """The option of hypothesis finds the profiles; those of a conftest go first."""
        pytester.makeconftest(conftest)
        pytester.makepyfile("def test_nothing(): ...")
        result = pytester.runpytest_subprocess(f"--hypothesis-profile={profile}", "-v")
        result.assert_outcomes(passed=1)
        result.stdout.fnmatch_lines([f"hypothesis profile {shown}"])


class TestLightness:
    """What a run that uses nothing of the plugin pays."""

    def test_nothing_heavy_is_imported(self, pytester):
        """Neither torch nor hypothesis nor accelfn is imported by a run that uses none."""
        pytester.makepyfile(
            """
            import sys

            def test_light(request):
                assert request.config.pluginmanager.hasplugin("accelfn")
                assert not {"torch", "hypothesis", "accelfn"} & set(sys.modules)
            """
        )
        pytester.runpytest_subprocess("-p", "no:cacheprovider").assert_outcomes(
            passed=1
        )

    @pytest.mark.slow
    def test_without_hypothesis(self, pytester):
        """Where hypothesis cannot be imported, marked tests run all the same."""
        pytester.makeconftest("import sys\nsys.modules['hypothesis'] = None\n")
        pytester.makepyfile(
            """
            import pytest

            @pytest.mark.simulated(2)
            def test_place(world):
                assert world.size == 2
            """
        )
        options = ("-p", "no:hypothesispytest", "-p", "no:cacheprovider")
        pytester.runpytest_subprocess(*options).assert_outcomes(passed=1)
