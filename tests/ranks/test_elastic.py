# SPDX-License-Identifier: Apache-2.0
"""Real processes whose world changes: killed by SIGKILL, started anew, and moved."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

import accelfn as af
from accelfn.testing import Crash, simulate
from tests.laws.elastic import elastic
from tests.ranks import programs_of_elastic as programs
from tests.ranks.commands import LAUNCH, SCRIPTS, run

SCRIPT = SCRIPTS / "loses_a_rank.py"
ROOT = Path(__file__).parents[2]


def launched(span, setup, victim, folder, then="comes in"):
    """Return the exit code, what each rank that ended well has trained, and what was told."""
    words = "--elastic", span, SCRIPT, setup, victim, folder, then
    code, _, error = run(*LAUNCH, *words, PYTHONPATH=ROOT)
    return code, [json.loads(each.read_text()) for each in folder.glob("*.json")], error


def as_written(results: Iterable[Any]) -> list[str]:
    """Return what simulated ranks have trained as the script writes it."""
    return sorted(
        str(
            [
                {path: each.tolist() for path, each in trained.items()},
                [*map(list, told)],
            ]
        )
        for trained, told in results
    )


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    ("setup", "victim", "size"),
    [("local sgd", 0, 2), ("ddp", 1, 3), ("fsdp", 0, 3), ("diloco", 0, 3)],
)
def test_ranks_that_come_and_go_train_what_simulated_ones_do(
    setup, victim, size, tmp_path
):
    """One is killed, the rest go on from their last average or save, another comes in."""
    code, found, error = launched(f"1:{size}", setup, victim, tmp_path)
    assert code == 0, error

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
    assert sorted(map(str, found)) == as_written(simulated)
    assert f"process {victim} (pid " in error
    assert f"was killed by SIGKILL; {size - 1} continue" in error


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("then", "said"),
    [
        ("is killed as it waits", "was killed by SIGKILL before it joined the run; it"),
        ("is late", "had not joined the run when the others finished, and is ended"),
    ],
)
def test_who_does_not_come_in_is_done_without(then, said, tmp_path):
    """The others end well, and the launcher says what became of it."""
    code, found, error = launched("1:2", "local sgd", 1, tmp_path, then)
    assert code == 0, error
    assert [told for _, told in found] == [[[0, 2], [4, 1]]]
    assert said in error


@pytest.mark.ranks(4)
def test_who_is_killed_as_a_world_is_opened_is_done_without(tmp_path):
    """The rest meet once more, and train what they would if both had died together."""
    then = "another dies as it opens"
    code, found, error = launched("1:4", "local sgd", 1, tmp_path, then)
    assert code == 0, error
    simulated = simulate(
        4,
        lambda world: elastic(world, programs.training("local sgd")),
        faults=[Crash(rank, step=programs.DIES) for rank in (1, 3)],
        elastic=1,
        sums="ring",
    )
    left = [each for each in simulated.results if each is not None]
    assert sorted(map(str, found)) == as_written(left)
    assert [told[:2] for _, told in found] == [[[0, 4], [4, 2]]] * 2


@pytest.mark.ranks(2)
def test_where_too_few_are_left_the_run_ends(tmp_path):
    """The report says which rank was killed, as it does of any other run."""
    code, found, error = launched("2:2", "ddp", 1, tmp_path)
    assert (code, found) == (137, [])
    assert "rank 1 failed first (killed by SIGKILL" in error
