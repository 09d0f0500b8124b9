# SPDX-License-Identifier: Apache-2.0
"""Runs of two real processes end well, or end for all with the culprit first."""

import re
import subprocess
import sys
from pathlib import Path

import attrs
import pytest

import accelfn as af
from tests.processes import RankError, run_ranks
from tests.ranks import programs
from tests.strategies import Run, differences
from tests.waiting import HANGS

pytestmark = pytest.mark.ranks(2)

SCRIPT = Path(__file__).parent / "scripts" / "trains.py"
LAUNCHERS = {
    "accelfn launch": ["-m", "accelfn", "launch", "--nproc", "2"],
    "torchrun": ["-m", "torch.distributed.run", "--nproc-per-node", "2"],
}
DDP = af.chain(af.shard_data(), af.wrap_ddp())


def launch(launcher: str, *args: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, *LAUNCHERS[launcher], str(SCRIPT), *args],
        capture_output=True,
        text=True,
        timeout=HANGS,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_run_ends_well(launcher):
    """Two processes train, communicate and end with exit code 0, group closed."""
    code, said = launch(launcher)
    assert "done after 8 updates" in said
    assert code == 0, said


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_rank_that_raises_ends_the_run(launcher):
    """Its traceback comes before that of the rank that waited, which ends when it is asked to."""
    code, said = launch(launcher, "raise")
    assert code == 1
    assert not re.search("SIGKILL|forcefully", said)
    culprit = said.index("ValueError: boom on rank 1")
    if "PeerFailedError:" in said:
        assert culprit < said.index("PeerFailedError:")


@pytest.mark.parametrize(("how", "code"), [("exit", 7), ("kill", 137)])
def test_a_rank_that_goes_ends_the_run(how, code):
    """The launcher names the rank that went, and ends with its code."""
    found, said = launch("accelfn launch", how)
    assert found == code
    assert "rank 1 failed first" in said
    assert re.search("rank 0 (followed: PeerFailed|was ended by SIGTERM)", said)


def test_ranks_with_different_values_are_refused():
    """Unseeded model instances are noticed when built, by the first tensor that differs."""
    with pytest.raises(
        RankError,
        match=r"(?s)ReplicaMismatchError.*values.*rank 0: weight.*rank 1: weight",
    ):
        run_ranks(2, programs.instance_by_rank)


def test_ranks_with_different_shapes_are_refused():
    """Models of different shapes are noticed when built."""
    with pytest.raises(
        RankError, match=r"(?s)ReplicaMismatchError.*structure.*\(2, 2\).*\(3, 2\)"
    ):
        run_ranks(2, programs.shape_by_rank)


def test_unreduced_gradients_are_refused():
    """A setup that reduces nothing in a world of two says what to add."""
    with pytest.raises(RankError, match=r"(?s)GradsError.*not reduced.*wrap_ddp"):
        run_ranks(2, programs.unreduced, Run())


def test_adding_to_reduced_gradients_is_refused():
    """into= reduced gradients would let replicas drift."""
    with pytest.raises(
        RankError, match="(?s)GradsError.*already reduced over the ranks"
    ):
        run_ranks(2, programs.add_to_reduced, Run(setup=DDP))


@pytest.mark.parametrize(
    "setup", [DDP, af.chain(DDP, af.accumulate(num_micro_batches=2))]
)
def test_a_step_that_raises_on_all_ranks_can_be_tried_again(setup):
    """The state is as it was, and the next step is the one that would have been."""
    run = Run(n=8, batch_size=8, updates=1, dyadic=False, kind="norm", loss="squared")
    run = attrs.evolve(run, setup=setup)
    expected = run_ranks(2, programs.train, run)
    for rank, (said, _, after) in enumerate(
        run_ranks(2, programs.fail_in_forward, run)
    ):
        assert "boom" in said
        assert differences(expected[rank][0][0], after) == []


def test_unused_parameters_are_named():
    """Without find_unused_parameters DDP would not reduce; the update is refused."""
    run = Run(kind="unused", setup=DDP, dyadic=False)
    with pytest.raises(
        RankError, match="(?s)UnusedParametersError.*unused.*find_unused"
    ):
        run_ranks(2, programs.train, run)
    found = attrs.evolve(
        run, setup=af.chain(af.shard_data(), af.wrap_ddp(find_unused_parameters=True))
    )
    assert len(run_ranks(2, programs.train, found)) == 2
