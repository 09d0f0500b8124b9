# SPDX-License-Identifier: Apache-2.0
"""Launchers that meet, restart and report; ranks that mpirun or srun would have started."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.ports import free_port
from tests.waiting import HANGS

SCRIPTS = Path(__file__).parent / "scripts"
TRAINS = SCRIPTS / "trains.py"

pytestmark = pytest.mark.ranks(2)


def started(
    words: list[object], env: Mapping[str, object] | None = None
) -> subprocess.Popen[str]:
    own = {name: str(value) for name, value in (env or {}).items()}
    return subprocess.Popen(
        [sys.executable, *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **own},
    )


def launched(*words: object) -> subprocess.Popen[str]:
    return started(["-m", "accelfn", "launch", *words])


def ended(runs: list[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    """Wait for the ends, and see to them: return each exit code, and what was said."""
    try:
        said = [run.communicate(timeout=HANGS) for run in runs]
    finally:
        for run in runs:
            run.kill()
            run.communicate()
    return [(r.returncode, out, err) for r, (out, err) in zip(runs, said, strict=True)]


def torchruns(rank: int, size: int, port: int) -> dict[str, object]:
    place = {"RANK": rank, "WORLD_SIZE": size}
    return {**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


GONE = "failed, left or did not arrive"


def test_the_launchers_axes_are_the_worlds():
    """`--axes` reaches `World.from_env()` in each rank, before a variable that was set."""
    words = ["-m", "accelfn", "launch", "--nproc", 2, "--axes", "dp_shard=-1"]
    run = started([*words, SCRIPTS / "axes.py"], {"ACCELFN_AXES": "tp=2"})
    ((code, out, error),) = ended([run])
    assert code == 0, error
    assert sorted(line.removeprefix("[rank 1] ") for line in out.splitlines()) == [
        "rank 0 of 2 along dp_shard, whose ranks sum to 3.0",
        "rank 1 of 2 along dp_shard, whose ranks sum to 3.0",
    ]


@pytest.mark.parametrize(
    ("size", "how", "code", "says"),
    [
        (2, "raise", 1, "rank 1 raised ValueError: boom on rank 1 at update 3"),
        (2, "exit", 7, "rank 1 raised SystemExit: 7 at update 3"),
        (2, "kill", -9, f"rank 1 {GONE}"),
        (2, "stop", None, f"rank 1 {GONE}"),
        (4, "stop", None, f"rank 1 {GONE}"),
    ],
)
def test_others_say_for_whom_they_waited(size, how, code, says):
    """However a rank goes in mid-step, all others name it, the collective and the update.

    Of two ranks, the other waits for three seconds; more of them share the same few cores.
    """
    port = free_port()
    runs = [
        started([TRAINS, how, 1, 1.5 * size], torchruns(rank, size, port))
        for rank in range(size)
    ]
    lost = runs.pop(1)
    try:
        for found, _, error in ended(runs):
            assert found == 1
            said = re.search(
                r"PeerFailedError: Rank \d of \d waited in 'DistributedDataParallel backward'"
                r" at update 3, but (.*?)\. ",
                error,
            )
            assert said is not None, error
            assert said[1] == says
        # one that ends by itself may take longer than those that it lost
        assert (lost.poll() if code is None else lost.wait(timeout=HANGS)) == code
    finally:
        lost.kill()
        lost.communicate()


def test_a_stopped_rank_is_the_culprit():
    """SIGSTOP is no end: the launcher finds the rank, ends it, and names it first."""
    ((code, out, error),) = ended([launched("--nproc", 2, TRAINS, "stop", 1, 3)])
    assert code == 128 + signal.SIGSTOP
    # and not ended by SIGKILL at last; a busy machine asks it once more before it is gone
    assert set(out.splitlines()) == {"[rank 1] asked to end"}
    report = error.rpartition("accelfn launch: ")[2].splitlines()
    assert report[0].startswith("rank 1 failed first (stopped by SIGSTOP, pid ")
    assert report[1].startswith("It left no traceback: a person")
    assert report[2].startswith("rank 0 followed: PeerFailedError: Rank 0 of 2 waited")


def test_a_rank_that_hangs_is_the_culprit():
    """Nothing failed but those that waited: the launcher shows where the other one was."""
    ((code, _, error),) = ended([launched("--nproc", 3, TRAINS, "hang", 1, 4)])
    assert code == 128 + signal.SIGTERM
    report = error.rpartition("accelfn launch: ")[2].splitlines()
    assert "rank 1 failed first (the other ranks waited for it, pid " in report[0]
    assert (
        report[1]
        == "It had not raised an error; the launcher ended it. Its stack, most recent call first:"
    )
    assert re.fullmatch(rf'  File "{TRAINS}", line \d+ in fail', report[2])
    assert re.fullmatch(rf'  File "{TRAINS}", line \d+ in <module>', report[-3])
    for rank, line in zip((0, 2), report[-2:], strict=True):
        assert line.startswith(
            f"rank {rank} followed: PeerFailedError: Rank {rank} of 3 "
        )
        assert f"but rank 1 {GONE}." in line


def test_two_processes_of_one_rank_are_refused():
    """All that meet are told, at once."""
    port = free_port()
    runs = [started([TRAINS], torchruns(rank, 3, port)) for rank in (0, 1, 1)]
    for code, _, error in ended(runs):
        assert code == 1
        assert "3 processes connected, but 2 with rank 1 and none with rank 2." in error


def test_a_world_can_be_opened_again():
    """What ranks meet by outlives a world, and is not taken for the next one's."""
    ((code, out, error),) = ended([launched("--nproc", 2, SCRIPTS / "opens.py")])
    assert code == 0, error
    assert sorted(line[-5:] for line in out.splitlines()) == ["0 3.0", "1 3.0", "2 3.0"]


def test_restarts_go_on_from_the_checkpoint(tmp_path):
    """A failure is reported, all ranks start again, and go on where they last saved."""
    script = SCRIPTS / "restarts.py"
    run = launched("--nproc", 2, "--max-restarts", 1, script, tmp_path)
    ((code, out, error),) = ended([run])
    assert code == 0, error
    assert sorted(re.findall(r"rank \d from.*", out)) == [
        "rank 0 from 0",
        "rank 0 from 4",
        "rank 1 from 0",
        "rank 1 from 4",
    ]
    assert out.count("done 8") == 2
    report = error.rpartition("accelfn launch: ")[2]
    assert report.startswith("rank 1 failed first (exit code 1, pid ")
    assert "ValueError: out of luck\nrank 0 " in report
    assert report.endswith("restart 1 of 1 follows\n")


def test_each_attempt_is_reported_for_itself(tmp_path):
    """Another rank fails after the restart, and it alone is named then."""
    script = tmp_path / "fails.py"
    script.write_text(FAILS_IN_TURN)
    ((code, _, error),) = ended(
        [launched("--nproc", 2, "--max-restarts", 1, script, tmp_path)]
    )
    assert code == 1, error
    first, second = error.split("accelfn launch: ")[-2:]
    assert first.startswith("rank 1 failed first (exit code 1, pid ")
    assert "RuntimeError: attempt 0" in first
    assert second.startswith("rank 0 failed first (exit code 1, pid ")
    assert "RuntimeError: attempt 1" in second


FAILS_IN_TURN = """\
import os, sys, time

rank, attempt = (int(os.environ[n]) for n in ("RANK", "TORCHELASTIC_RESTART_COUNT"))
came = os.path.join(sys.argv[1], f"{attempt}{rank}")
other = os.path.join(sys.argv[1], f"{attempt}{1 - rank}")
open(came, "w").close()
while not os.path.exists(other):
    time.sleep(0.01)
if rank != attempt:
    raise RuntimeError(f"attempt {attempt}")
time.sleep(600)
"""


@pytest.mark.parametrize("how", ["numbered", "dynamic"])
def test_machines_meet_and_restart(how, tmp_path):
    """Two launchers make one run, by number or by torch's rendezvous; all start again."""
    port, script = free_port(), SCRIPTS / "restarts.py"
    common = ["--nproc", 1, "--num-machines", 2, "--max-restarts", 1]
    meets = {
        "numbered": ["--main-address", "127.0.0.1", "--main-port", port],
        "dynamic": ["--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "a run"],
    }[how]
    runs: list[subprocess.Popen[str]] = []
    for rank in range(2):
        number = ["--machine-rank", rank] if how == "numbered" else []
        runs.append(launched(*common, *meets, *number, script, tmp_path))
    found = ended(runs)
    assert [code for code, _, _ in found] == [0, 0], found
    said = "".join(out for _, out, _ in found)
    assert sorted(re.findall(r"rank \d from.*", said)) == [
        "rank 0 from 0",
        "rank 0 from 4",
        "rank 1 from 0",
        "rank 1 from 4",
    ]
    assert said.count("done 8") == 2
    errors = "".join(error for _, _, error in found)
    assert errors.count("rank 1 failed first") == 1
    assert "ValueError: out of luck" in errors


@pytest.mark.parametrize("rank", [0, 1])
def test_a_machine_that_waits_alone_says_so(rank):
    """Where the others do not come, the launcher says where it waited, and for how long."""
    port = free_port()
    meets = ["--main-address", "127.0.0.1", "--main-port", port, "--join-timeout", 1]
    run = launched("--num-machines", 2, "--machine-rank", rank, *meets, TRAINS)
    ((code, out, error),) = ended([run])
    assert (code, out) == (2, "")
    said = error.splitlines()[-1]
    assert f"the machines did not connect at 127.0.0.1:{port} within 1 s" in said
    assert "Traceback" not in error


def open_mpi(rank: int, port: int) -> dict[str, object]:
    names = "RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"
    place = zip(names, (rank, 2, rank, 2), strict=True)
    found = {f"OMPI_COMM_WORLD_{name}": value for name, value in place}
    return {**found, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


def slurm(rank: int, port: int) -> dict[str, object]:
    return {
        "SLURM_PROCID": rank,
        "SLURM_LOCALID": rank,
        "SLURM_NODEID": 0,
        "SLURM_NTASKS": 2,
        "SLURM_STEP_NUM_TASKS": 2,
        "SLURM_STEP_TASKS_PER_NODE": 2,
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_JOB_ID": port,  # the job's port follows from it
        "SLURM_STEP_ID": 0,
    }


@pytest.mark.parametrize("place", [open_mpi, slurm])
def test_ranks_of_mpirun_and_srun_train(place):
    """Two processes in such an environment find each other, train and end well."""
    port = free_port()
    found = ended([started([TRAINS], place(rank, port)) for rank in range(2)])
    assert [code for code, _, _ in found] == [0, 0], found
    assert sum("done after 8 updates" in out for _, out, _ in found) == 1
