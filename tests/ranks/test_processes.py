# SPDX-License-Identifier: Apache-2.0
"""`run_processes` runs programs on real ranks, and returns or raises whatever they do."""

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import accelfn as af
from accelfn.testing import RankError, processes, run_processes
from tests.ranks.commands import run
from tests.waiting import HANGS, is_gone, wait_until

pytestmark = pytest.mark.ranks(2)


def place(world: af.World) -> tuple[int, int, int]:
    return world.rank, world.size, os.getpid()


def total(world: af.World, values: torch.Tensor) -> torch.Tensor:
    mine = values * (world.rank + 1)
    dist.all_reduce(mine, group=world.group)
    return mine


def surroundings(world: af.World) -> dict[str, Any]:
    single = torch.ones(2, 2, dtype=torch.float32)
    return {
        "place": world.rank,
        "directory": str(Path.cwd()),
        "variable": os.environ.get("ACCELFN_TEST"),
        "rank": os.environ.get("RANK"),
        "threads": torch.get_num_threads(),
        "dtype": torch.tensor(1.0).dtype,
        "grad": torch.is_grad_enabled(),
        "product": (single @ single).dtype,
        "world": af.World.from_env(device="cpu").rank,
    }


def rows_of_workers(world: af.World) -> list[int]:
    loader = torch.utils.data.DataLoader([world.rank, 2, 3], num_workers=1)
    return [int(row) for row in loader]


class BoomError(Exception):
    """Leaves a file when it is forgotten: then its rank knows when it was raised."""

    def __init__(self, left: Path) -> None:
        super().__init__()
        self.left = left

    def __del__(self) -> None:
        self.left.touch()


def raise_in_turn(world: af.World, first: int, folder: str) -> None:
    """Raise on one rank, and on the other when that one has raised."""
    left = Path(folder, str(first))
    if world.rank == first:
        raise BoomError(left)
    wait_until(left.exists)
    msg = f"boom on rank {world.rank}"
    raise ValueError(msg)


def raise_alone(world: af.World) -> None:
    if world.rank == 0:
        raise ValueError("boom on rank 0")
    threading.Event().wait()


def end(world: af.World, how: str) -> None:
    """End rank 1, or broadcast more than the others expect, which Gloo answers with an abort."""
    if how == "abort":
        dist.broadcast(torch.ones(3 - world.rank), src=0, group=world.group)
    elif world.rank == 1:
        if how == "exit":
            os._exit(7)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier(group=world.group)


def spin(world: af.World, folder: str) -> None:
    (Path(folder) / str(world.rank)).write_text(str(os.getpid()))
    while True:
        pass


def unsendable(world: af.World) -> object:
    return world.rank, threading.Lock()


ROOT = Path(__file__).parents[2]


def test_results_are_in_the_order_of_ranks():
    """Each rank knows its place; a second program runs in the processes of the first."""
    for size in (1, 2, 3):
        found = run_processes(size, place)
        assert [(r, size) for r in range(size)] == [each[:2] for each in found]
        assert found == run_processes(size, place)


def test_arguments_and_results_of_any_size_travel():
    """Tensors larger than a pipe's buffer come and go, and ranks really talk."""
    values = torch.arange(1e6)
    for found in run_processes(2, total, values):
        assert torch.equal(found, 3 * values)


def test_two_threads_take_turns():
    """Programs of several threads do not get one another's answers."""
    with ThreadPoolExecutor(4) as threads:
        found = threads.map(
            lambda i: run_processes(2, total, torch.tensor(i)), range(20)
        )
        assert [3 * i for i in range(20)] == [int(first) for first, _ in found]


def test_ranks_find_what_the_caller_has(tmp_path, monkeypatch):
    """Directory, environment, dtype and modes are the caller's, the next caller's too."""
    before = run_processes(2, surroundings)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELFN_TEST", "seen")
    torch.set_default_dtype(torch.float64)
    try:
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            found = run_processes(2, surroundings)
    finally:
        torch.set_default_dtype(torch.float32)
    monkeypatch.undo()
    for rank, each in enumerate(found):
        assert (str(tmp_path), "seen") == (each["directory"], each["variable"])
        assert (torch.float64, torch.bfloat16) == (each["dtype"], each["product"])
        assert (rank, str(rank), rank) == (each["place"], each["rank"], each["world"])
        assert not each["grad"]
        assert each["threads"] == torch.get_num_threads()
    after = run_processes(2, surroundings)
    for key in ("directory", "variable", "dtype", "grad"):
        assert before[0][key] == after[0][key]


def test_ranks_may_start_processes():
    """A DataLoader's workers run in a rank."""
    assert run_processes(2, rows_of_workers) == [[0, 2, 3], [1, 2, 3]]


def test_a_result_that_cannot_be_sent_is_refused():
    """The error names it."""
    with pytest.raises(RankError, match="(?s)ArgumentError.*pickle cannot send.*lock"):
        run_processes(2, unsendable)


def test_the_rank_that_failed_first_is_shown(tmp_path, monkeypatch):
    """Its traceback comes first, the later error on a line, whatever the rank."""
    monkeypatch.setattr(processes, "_GRACE_SECONDS", HANGS)  # however busy the machine
    for first in (0, 1):
        with pytest.raises(RankError) as raised:
            run_processes(2, raise_in_turn, first, str(tmp_path))
        said = str(raised.value)
        assert said.startswith(f"Rank {first} of 2 failed first:\nTraceback")
        assert "in raise_in_turn" in said
        late = 1 - first
        other = f"Rank {late} of 2 failed later: ValueError: boom on rank {late}"
        assert said.splitlines()[-1] == other


def test_a_rank_that_raises_ends_those_that_wait():
    """Nobody waits for ranks that hang when another has failed; and a new world opens."""
    with pytest.raises(RankError, match="(?s)Rank 0 of 2.*boom on rank 0"):
        run_processes(2, raise_alone, timeout=1000)
    assert [rank for rank, _, _ in run_processes(2, place)] == [0, 1]


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("exit", "ended with exit code 7"),
        ("kill", "ended by SIGKILL"),
        ("abort", "ended by SIGABRT.*with simulate"),
    ],
)
def test_a_rank_that_ends_is_named(how, said):
    """Its end comes before what the rank that waited for it says; Gloo's abort is explained."""
    with pytest.raises(RankError, match=rf"(?s)^Rank 1 of 2 failed first:\n.*{said}"):
        run_processes(2, end, how)


def test_ranks_that_never_return_are_ended(tmp_path):
    """The error names those that are late; the processes are gone."""
    ranks = [pid for _, _, pid in run_processes(2, place)]
    with pytest.raises(RankError, match=r"rank 0, 1 of 2 did not return within 1 s"):
        run_processes(2, spin, str(tmp_path), timeout=1)
    wait_until(lambda: all(map(is_gone, ranks)))


def test_a_rank_that_died_between_programs_is_replaced():
    """The next program runs on new processes."""
    processes = [pid for _, _, pid in run_processes(2, place)]
    os.kill(processes[1], 9)
    wait_until(lambda: is_gone(processes[1]))
    assert [rank for rank, _, _ in run_processes(2, place)] == [0, 1]


SCRIPT = """
import sys
from accelfn.testing.processes import run_processes
from tests.ranks.test_processes import place, spin

print([rank for rank, _, _ in run_processes(2, place)], flush=True)

def mine(world):
    return world.rank

try:
    run_processes(2, mine)
except ValueError as error:
    print(error, flush=True)
if len(sys.argv) > 1:
    run_processes(2, spin, sys.argv[1])
"""


def test_a_script_needs_no_guard_and_ends():
    """Ranks neither run the script again nor outlive it; what it defines is refused."""
    code, out, error = run(sys.executable, "-c", SCRIPT, cwd=ROOT)
    first, second = out.splitlines()
    assert first == "[0, 1]"
    assert second.startswith("mine is defined in the running script or session")
    assert (code, error) == (0, "")


def test_ranks_do_not_outlive_a_caller_that_is_killed(tmp_path):
    """Though it cannot end them, and they are busy."""
    script = tmp_path / "script.py"
    script.write_text(f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{SCRIPT}")
    with subprocess.Popen(
        [sys.executable, str(script), str(tmp_path)], stdout=subprocess.DEVNULL
    ) as caller:
        wait_until(lambda: (tmp_path / "0").exists() and (tmp_path / "1").exists())
        caller.kill()
    for rank in range(2):
        process = int((tmp_path / str(rank)).read_text())
        wait_until(partial(is_gone, process))
