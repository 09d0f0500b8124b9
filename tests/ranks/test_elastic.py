# SPDX-License-Identifier: Apache-2.0
"""Real processes whose world changes: killed by SIGKILL, started anew, and moved."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import accelfn as af
from accelfn.testing import Crash, run_processes, simulate
from tests.laws.elastic import elastic
from tests.ranks import programs_of_elastic as programs
from tests.waiting import HANGS

SCRIPT = Path(__file__).parent / "scripts" / "loses_a_rank.py"
ROOT = Path(__file__).parents[2]


def launched(span, setup, victim, folder, then="comes in"):
    command = [
        sys.executable,
        "-m",
        "accelfn",
        "launch",
        "--elastic",
        span,
        str(SCRIPT),
    ]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.run(
        [*command, setup, str(victim), str(folder), then],
        check=False,
        capture_output=True,
        text=True,
        timeout=HANGS,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(paths),
        },
    )


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    ("setup", "victim", "size"),
    [("local sgd", 0, 2), ("ddp", 1, 3), ("fsdp", 0, 3), ("diloco", 0, 3)],
)
def test_ranks_that_come_and_go_train_what_simulated_ones_do(
    setup, victim, size, tmp_path
):
    """One is killed, the rest go on from the last average, another comes in: bit by bit.

    Those of a model that is split go on from the last checkpoint.
    """
    run = launched(f"1:{size}", setup, victim, tmp_path)
    assert run.returncode == 0, run.stderr
    found = [json.loads(each.read_text()) for each in tmp_path.glob("*.json")]

    def trains(world: af.World) -> Any:
        save, restore = programs.checkpoints(setup, tmp_path / "simulated")
        training = programs.training(setup)
        return elastic(world, training, averaged=save, restore=restore)

    simulated = simulate(
        size,
        trains,
        faults=[Crash(victim, step=programs.DIES, returns=programs.COMES_IN - 1)],
        elastic=1,
        sums="ring",
    )
    expected = [
        [{path: each.tolist() for path, each in trained.items()}, list(map(list, told))]
        for trained, told in simulated
    ]
    assert sorted(map(str, found)) == sorted(map(str, expected))
    assert f"process {victim} (pid " in run.stderr
    assert f"was killed by SIGKILL; {size - 1} continue" in run.stderr


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("then", "said"),
    [
        ("is killed", "was killed by SIGKILL before it joined the run; it is not"),
        (
            "is killed as it waits",
            "was killed by SIGKILL before it joined the run; it is not",
        ),
        ("is late", "had not joined the run when the others finished, and is ended"),
    ],
)
def test_who_does_not_come_in_is_done_without(then, said, tmp_path):
    """The others end well, and the launcher says what became of it."""
    run = launched("1:2", "local sgd", 1, tmp_path, then)
    assert run.returncode == 0, run.stderr
    (found,) = [json.loads(each.read_text()) for each in tmp_path.glob("*.json")]
    assert found[1] == [[0, 2], [4, 1]]
    assert said in run.stderr


@pytest.mark.ranks(4)
def test_who_is_killed_as_a_world_is_opened_is_done_without(tmp_path):
    """The rest meet once more, and train what they would if both had died together."""
    run = launched("1:4", "local sgd", 1, tmp_path, "another dies as it opens")
    assert run.returncode == 0, run.stderr
    found = [json.loads(each.read_text()) for each in tmp_path.glob("*.json")]
    simulated = simulate(
        4,
        lambda world: elastic(world, programs.training("local sgd")),
        faults=[Crash(rank, step=programs.DIES) for rank in (1, 3)],
        elastic=1,
        sums="ring",
    )
    left = [each for each in simulated.results if each is not None]
    expected = [
        [{path: each.tolist() for path, each in trained.items()}, list(map(list, told))]
        for trained, told in left
    ]
    assert sorted(map(str, found)) == sorted(map(str, expected))
    assert [told[:2] for _, told in found] == [[[0, 4], [4, 2]]] * 2


@pytest.mark.ranks(2)
def test_where_too_few_are_left_the_run_ends(tmp_path):
    """The report says which rank was killed, as it does of any other run."""
    run = launched("2:2", "ddp", 1, tmp_path)
    assert run.returncode == 137
    assert "rank 1 failed first (killed by SIGKILL" in run.stderr
    assert list(tmp_path.glob("*.json")) == []


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    ("setup", "total", "givers", "size"),
    [("local sgd", 3, 3, 1), ("ddp", 3, 1, 3), ("diloco", 2, 2, 2)],
)
def test_a_state_is_moved_between_processes(setup, total, givers, size, tmp_path):
    """On more, fewer or as many ranks it is what a load gives them, and goes on so."""
    fn = partial(
        programs.moved, setup=setup, givers=givers, size=size, folder=str(tmp_path)
    )
    assert list(run_processes(total, fn)) == [[[], []]] * total
