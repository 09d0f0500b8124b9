# SPDX-License-Identifier: Apache-2.0
"""`run_processes` runs programs on real ranks, and returns or raises whatever they do."""

import math
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch

import accelfn as af
from accelfn.testing import RankError, processes, run_processes
from tests.ranks import programs_of_processes as programs
from tests.waiting import HANGS, is_gone, wait_until

pytestmark = pytest.mark.ranks(2)
ROOT = Path(__file__).parents[2]


def test_results_are_in_the_order_of_ranks():
    """Each rank knows its place, and its result stands there."""
    for size in (1, 2, 3):
        found = run_processes(size, programs.place)
        assert [(r, size) for r in range(size)] == [each[:2] for each in found]


def test_ranks_stay_between_programs():
    """A second program runs in the processes of the first."""
    assert run_processes(2, programs.place) == run_processes(2, programs.place)


def test_arguments_and_results_of_any_size_travel():
    """Tensors larger than a pipe's buffer come and go, and ranks really talk."""
    values = torch.arange(1e6)
    for found in run_processes(2, programs.total, values):
        assert torch.equal(found, 3 * values)


def test_two_threads_take_turns():
    """Programs of several threads do not get one another's answers."""
    with ThreadPoolExecutor(4) as threads:
        found = threads.map(
            lambda i: run_processes(2, programs.total, torch.tensor(i)), range(20)
        )
        assert [3 * i for i in range(20)] == [int(first) for first, _ in found]


def test_ranks_find_what_the_caller_has(tmp_path, monkeypatch):
    """Directory, environment, dtype and modes are the caller's, the next caller's too."""
    before = run_processes(2, programs.surroundings)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELFN_TEST", "seen")
    torch.set_default_dtype(torch.float64)
    try:
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            found = run_processes(2, programs.surroundings)
    finally:
        torch.set_default_dtype(torch.float32)
    monkeypatch.undo()
    for rank, each in enumerate(found):
        assert (str(tmp_path), "seen") == (each["directory"], each["variable"])
        assert (torch.float64, torch.bfloat16) == (each["dtype"], each["product"])
        assert (rank, str(rank), rank) == (each["place"], each["rank"], each["world"])
        assert not each["grad"]
        assert each["threads"] == torch.get_num_threads()
    after = run_processes(2, programs.surroundings)
    for key in ("directory", "variable", "dtype", "grad"):
        assert before[0][key] == after[0][key]


def test_ranks_may_start_processes():
    """A DataLoader's workers run in a rank."""
    assert run_processes(2, programs.rows_of_workers) == [[0, 2, 3], [1, 2, 3]]


def unmade() -> Callable[..., None]:
    def inside(world: af.World) -> None: ...

    return inside


@pytest.mark.parametrize(
    ("fn", "args", "said"),
    [
        pytest.param(lambda world: world.rank, (), "is a lambda", id="lambda"),
        pytest.param(unmade(), (), "is defined in a function", id="closure"),
        pytest.param(
            partial(programs.total, values=lambda: 1), (), "is a lambda", id="partial"
        ),
        pytest.param(programs.total, (threading.Lock(),), "pickle cannot", id="lock"),
        pytest.param("place", (), "a function that takes a World", id="no function"),
    ],
)
def test_what_cannot_be_sent_is_refused(fn, args, said):
    """Before any rank starts, the error says what, and what to do."""
    with pytest.raises(af.errors.ArgumentError, match=said):
        run_processes(2, fn, *args)


@pytest.mark.parametrize("size", [0, -1, True, 2.0, "2"])
def test_a_size_is_a_number_of_ranks(size):
    """Anything but a positive integer is refused."""
    with pytest.raises(af.errors.ArgumentError, match="number of ranks"):
        run_processes(size, programs.place)


@pytest.mark.parametrize("timeout", [0, -1.0, math.nan, math.inf, None, True])
def test_a_timeout_is_a_number_of_seconds(timeout):
    """It is positive and finite."""
    with pytest.raises(af.errors.ArgumentError, match="timeout"):
        run_processes(2, programs.place, timeout=timeout)


def test_a_result_that_cannot_be_sent_is_refused():
    """The error names it."""
    with pytest.raises(RankError, match="(?s)ArgumentError.*pickle cannot send.*lock"):
        run_processes(2, programs.unsendable)


def test_the_rank_that_failed_first_is_shown(tmp_path, monkeypatch):
    """Its traceback comes first, the later error on a line, whatever the rank."""
    monkeypatch.setattr(processes, "_GRACE_SECONDS", HANGS)  # however busy the machine
    for first in (0, 1):
        with pytest.raises(RankError) as raised:
            run_processes(2, programs.raise_in_turn, first, str(tmp_path))
        said = str(raised.value)
        assert said.startswith(f"Rank {first} of 2 failed first:\nTraceback")
        assert "in raise_in_turn" in said
        late = 1 - first
        other = f"Rank {late} of 2 failed later: ValueError: boom on rank {late}"
        assert said.splitlines()[-1] == other


def test_a_rank_that_raises_ends_those_that_wait():
    """Nobody waits for ranks that hang when another has failed; and a new world opens."""
    with pytest.raises(RankError, match="(?s)Rank 0 of 2.*boom on rank 0"):
        run_processes(2, programs.raise_alone, timeout=1000)
    assert [rank for rank, _, _ in run_processes(2, programs.place)] == [0, 1]


@pytest.mark.parametrize(
    ("how", "said"), [("exit", "ended with exit code 7"), ("kill", "ended by SIGKILL")]
)
def test_a_rank_that_ends_is_named(how, said):
    """Its end comes before what the rank that waited for it says."""
    with pytest.raises(RankError, match=rf"(?s)^Rank 1 of 2 failed first:\n.*{said}"):
        run_processes(2, programs.end, how)


def test_an_abort_of_gloo_is_explained():
    """A process that Gloo aborts raises nothing; the error says why that may be."""
    with pytest.raises(RankError, match="(?s)Rank 1.*ended by SIGABRT.*with simulate"):
        run_processes(2, programs.send_too_much)


def test_ranks_that_never_return_are_ended(tmp_path):
    """The error names those that are late; the processes are gone."""
    ranks = [pid for _, _, pid in run_processes(2, programs.place)]
    with pytest.raises(RankError, match=r"rank 0, 1 of 2 did not return within 1 s"):
        run_processes(2, programs.spin, str(tmp_path), timeout=1)
    wait_until(lambda: all(map(is_gone, ranks)))


def test_a_rank_that_died_between_programs_is_replaced():
    """The next program runs on new processes."""
    processes = [pid for _, _, pid in run_processes(2, programs.place)]
    os.kill(processes[1], 9)
    wait_until(lambda: is_gone(processes[1]))
    assert [rank for rank, _, _ in run_processes(2, programs.place)] == [0, 1]


SCRIPT = """
import sys
from accelfn.testing.processes import run_processes
from tests.ranks import programs_of_processes as programs

print([rank for rank, _, _ in run_processes(2, programs.place)], flush=True)

def mine(world):
    return world.rank

try:
    run_processes(2, mine)
except ValueError as error:
    print(error, flush=True)
if len(sys.argv) > 1:
    run_processes(2, programs.spin, sys.argv[1])
"""


def test_a_script_needs_no_guard_and_ends():
    """Ranks neither run the script again nor outlive it; what it defines is refused."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=HANGS,
        check=True,
    )
    first, second = done.stdout.splitlines()
    assert first == "[0, 1]"
    assert second.startswith("mine is defined in the running script or session")
    assert done.stderr == ""


def test_ranks_do_not_outlive_a_caller_that_is_killed(tmp_path):
    """Though it cannot end them, and they are busy."""
    script = tmp_path / "script.py"
    script.write_text(f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{SCRIPT}")
    with subprocess.Popen(
        [sys.executable, str(script), str(tmp_path)], stdout=subprocess.DEVNULL
    ) as caller:
        wait_until(lambda: (tmp_path / "0").exists() and (tmp_path / "1").exists())
        caller.kill()
    assert_gone(tmp_path)


def assert_gone(folder: Path) -> None:
    """Assert that the processes which told their ids are no more."""
    for rank in range(2):
        process = int((folder / str(rank)).read_text())
        wait_until(partial(is_gone, process))
