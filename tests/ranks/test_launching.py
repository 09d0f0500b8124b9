# SPDX-License-Identifier: Apache-2.0
"""Real processes that raise, exit, hang or are killed: the run ends, and others name the rank."""

import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import accelfn as af
from tests.ports import free_port
from tests.ranks.commands import LAUNCH, SCRIPTS, TRAINS, ended, launched, run, started
from tests.waiting import HANGS, is_gone, wait_until

SCRIPT = TRAINS[1]
PACKAGE = Path(af.__file__).parent
GONE = "failed, left or did not arrive"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", 2]

pytestmark = pytest.mark.ranks(2)


def place(rank: int, size: int, port: int) -> dict[str, object]:
    meets = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return {"RANK": rank, "WORLD_SIZE": size, **meets}


def report(error: str) -> list[str]:
    return error.rpartition("accelfn launch: ")[2].splitlines()


def test_a_run_of_torchrun_ends_well():
    """Two processes train, communicate and end with exit code 0, group closed."""
    code, out, error = run(*TORCHRUN, SCRIPT)
    assert code == 0, error
    assert "done after 8 updates" in out


def test_a_rank_that_raises_ends_a_run_of_torchrun():
    """Its traceback comes before that of the rank that waited, which ends when it is asked to."""
    code, out, error = run(*TORCHRUN, SCRIPT, "raise")
    assert code == 1
    said = out + error
    assert not re.search("SIGKILL|forcefully", said)
    culprit = said.index("ValueError: boom on rank 1")
    if "PeerFailedError:" in said:
        assert culprit < said.index("PeerFailedError:")


def test_a_world_can_be_opened_again():
    """What ranks meet by is not the next world's; `--axes` comes before a variable."""
    words = ["--nproc", 2, "--axes", "dp_shard=-1", SCRIPTS / "opens.py"]
    code, out, error = run(*LAUNCH, *words, ACCELFN_AXES="tp=2")
    assert code == 0, error
    assert sorted(line.removeprefix("[rank 1] ") for line in out.splitlines()) == [
        f"{number}: rank {rank} of 2 along dp_shard, sum 3.0"
        for number in range(3)
        for rank in range(2)
    ]


@pytest.mark.parametrize(
    ("size", "how", "code", "says"),
    [
        (2, "exit", 7, "rank 1 raised SystemExit: 7 at update 3"),
        (4, "stop", None, f"rank 1 {GONE}"),
    ],
)
def test_others_say_for_whom_they_waited(size, how, code, says):
    """However a rank goes in mid-step, all others name it, the collective and the update."""
    seconds = 1.5 * size  # more ranks share the same few cores
    port, words = free_port(), [*TRAINS, how, 1, seconds]
    runs = [started(*words, **place(rank, size, port)) for rank in range(size)]
    lost = runs.pop(1)
    try:
        for found, _, error in ended(*runs):
            assert found == 1
            waited = "waited in 'DistributedDataParallel backward' at update 3"
            said = re.search(
                rf"PeerFailedError: Rank \d of \d {waited}, but (.*?)\. ", error
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
    code, out, error = run(*LAUNCH, "--nproc", 2, SCRIPT, "stop", 1, 3)
    assert code == 128 + signal.SIGSTOP
    # and not ended by SIGKILL at last; a busy machine asks it once more before it is gone
    assert set(out.splitlines()) == {"[rank 1] asked to end"}
    lines = report(error)
    assert lines[0].startswith("rank 1 failed first (stopped by SIGSTOP, pid ")
    assert lines[1].startswith("It left no traceback: a person")
    assert lines[2].startswith("rank 0 followed: PeerFailedError: Rank 0 of 2 waited")


def test_a_rank_that_hangs_is_the_culprit():
    """Nothing failed but those that waited: the launcher shows where the other one was."""
    code, _, error = run(*LAUNCH, "--nproc", 3, SCRIPT, "hang", 1, 4)
    assert code == 128 + signal.SIGTERM
    lines = report(error)
    assert "rank 1 failed first (the other ranks waited for it, pid " in lines[0]
    assert (
        lines[1]
        == "It had not raised an error; the launcher ended it. Its stack, most recent call first:"
    )
    assert re.fullmatch(rf'  File "{SCRIPT}", line \d+ in fail', lines[2])
    assert re.fullmatch(rf'  File "{SCRIPT}", line \d+ in <module>', lines[-3])
    for rank, line in zip((0, 2), lines[-2:], strict=True):
        followed = f"rank {rank} followed: PeerFailedError: Rank {rank} of 3 "
        assert line.startswith(followed)
        assert f"but rank 1 {GONE}." in line


def test_two_processes_of_one_rank_are_refused():
    """All that meet are told, at once."""
    port = free_port()
    runs = [started(*TRAINS, **place(rank, 3, port)) for rank in (0, 1, 1)]
    for code, _, error in ended(*runs):
        assert code == 1
        assert "3 processes connected, but 2 with rank 1 and none with rank 2." in error


# restarts and several machines


def test_each_attempt_is_reported_for_itself(tmp_path):
    """Another rank fails after the restart, and it alone is named then, with its own seconds."""
    script = tmp_path / "fails.py"
    script.write_text(FAILS_IN_TURN)
    words = "--nproc", 2, "--max-restarts", 1, script, tmp_path
    code, _, error = run(*LAUNCH, *words)
    assert code == 1, error
    seconds: list[float] = []
    for attempt, said in enumerate(error.split("accelfn launch: ")[-2:]):
        assert said.startswith(f"rank {1 - attempt} failed first (exit code 1, pid ")
        assert f"RuntimeError: attempt {attempt}" in said
        seconds.append(float(re.findall(r" after (\d+\.\d) s", said)[0]))
    first, second = ((tmp_path / f"failed-{n}").stat().st_mtime for n in range(2))
    assert seconds[0] >= 1.0  # as it waited
    assert seconds[1] < second - first + 0.5


FAILS_IN_TURN = """\
import os, sys, time

rank, attempt = (int(os.environ[n]) for n in ("RANK", "TORCHELASTIC_RESTART_COUNT"))
came = os.path.join(sys.argv[1], f"{attempt}{rank}")
other = os.path.join(sys.argv[1], f"{attempt}{1 - rank}")
open(came, "w").close()
while not os.path.exists(other):
    time.sleep(0.01)
time.sleep(1.0 - attempt)
if rank != attempt:
    open(os.path.join(sys.argv[1], f"failed-{attempt}"), "w").close()
    raise RuntimeError(f"attempt {attempt}")
time.sleep(600)
"""


@pytest.mark.parametrize("how", ["numbered", "dynamic"])
def test_machines_meet_and_restart(how, tmp_path):
    """Two launchers that meet by number or torch's rendezvous go on from the last save."""
    port, script = free_port(), [SCRIPTS / "stops.py", tmp_path, 12, 60, "fails"]
    many = ["--nproc", 1, "--num-machines", 2, "--max-restarts", 1]
    by_number = ["--main-address", "127.0.0.1", "--main-port", port]
    by_name = ["--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "a run"]
    words = {
        "numbered": [[*many, *by_number, "--machine-rank", rank] for rank in range(2)],
        "dynamic": [[*many, *by_name]] * 2,
    }[how]
    found = ended(*[launched(*each, *script) for each in words])
    assert {code for code, _, _ in found} == {0}, found
    said = "".join(out for _, out, _ in found)
    assert sorted(re.findall(r"rank \d of 2 from.*", said)) == [
        f"rank {rank} of 2 from {step}" for rank in range(2) for step in (0, 5)
    ]
    assert said.count("done 12") == 2
    errors = "".join(error for _, _, error in found)
    assert errors.count("rank 1 failed first (exit code 1, pid ") == 1
    assert "ValueError: out of luck\n" in errors
    assert "restart 1 of 1 follows\n" in errors


@pytest.mark.parametrize("rank", [0, 1])
def test_a_machine_that_waits_alone_says_so(rank):
    """Where the others do not come, the launcher says where it waited, and for how long."""
    port = free_port()
    meets = ["--main-address", "127.0.0.1", "--main-port", port, "--join-timeout", 1]
    machine = "--num-machines", 2, "--machine-rank", rank
    code, out, error = run(*LAUNCH, *machine, *meets, SCRIPT)
    assert (code, out) == (2, "")
    said = error.splitlines()[-1]
    assert f"the machines did not connect at 127.0.0.1:{port} within 1 s" in said
    assert "Traceback" not in error


def slurm(rank: int, port: int) -> dict[str, object]:
    step = {"NUM_TASKS": 2, "TASKS_PER_NODE": 2, "NODELIST": "localhost", "ID": 0}
    # the job's port follows from its number
    task = {"PROCID": rank, "LOCALID": rank, "NODEID": 0, "NTASKS": 2, "JOB_ID": port}
    found = {**task, **{f"STEP_{name}": value for name, value in step.items()}}
    return {f"SLURM_{name}": value for name, value in found.items()}


def test_ranks_of_srun_train():
    """Two processes in its environment find each other, train and end well."""
    port = free_port()
    runs = [started(*TRAINS, **slurm(rank, port)) for rank in range(2)]
    found = ended(*runs)
    assert [code for code, _, _ in found] == [0, 0], found
    assert sum("done after 8 updates" in out for _, out, _ in found) == 1


# signals


def has_saved(store: af.CheckpointStore, before: object, run: Any) -> bool:
    """Whether a run has saved anew, or is over."""
    return store.steps != before or run.poll() is not None


def test_a_launched_run_stops_and_goes_on(tmp_path):
    """SIGTERM to launcher or rank: both ranks save one update, exit with 143, and stay ended."""

    def stops(folder: str, updates: int) -> subprocess.Popen[str]:
        words = ["--nproc", 2, "--max-restarts", 1, SCRIPTS / "stops.py"]
        return launched(*words, tmp_path / folder, updates)

    def finished(folder: str, updates: int) -> set[str]:
        ((code, out, error),) = ended(stops(folder, updates))
        assert code == 0, error
        return set(re.findall(r"done .*", out))

    store = af.CheckpointStore(tmp_path / "cut")
    for to_launcher in (True, False):
        before, cut = store.steps, stops("cut", 10**6)
        assert cut.stdout is not None
        line = min(cut.stdout.readline() for _ in range(2))  # rank 1 has a [
        pid = int(line.split("process ")[1].split()[0])
        wait_until(partial(has_saved, store, before, cut))
        os.kill(cut.pid if to_launcher else pid, signal.SIGTERM)
        ((code, out, error),) = ended(cut)
        assert code == 143, error
        assert "done" not in out
        assert "Traceback" not in error
        assert "SIGTERM" in error.splitlines()[-1]
        assert list(store.directory.glob(".*")) == []
    updates = store.steps[-1] + 20
    whole = finished("whole", updates)
    assert len(whole) == 1
    assert whole == finished("cut", updates)


def test_a_signal_waits_for_a_collective():
    """Asked to end while it waits for a rank that hangs, a rank ends in time, and says why."""
    port = free_port()
    words = [sys.executable, SCRIPTS / "waits.py"]
    first, hangs = (started(*words, **place(rank, 2, port)) for rank in range(2))
    try:
        assert first.stdout is not None
        assert first.stdout.readline() == "waits\n"
        os.kill(first.pid, signal.SIGTERM)
        ((code, _, error),) = ended(first)
    finally:
        hangs.kill()
        hangs.communicate()
    assert code == 1
    assert f"waited in 'stopping', but rank 1 {GONE}" in error


CALLS = """
import os, sys, threading
from pathlib import Path
import accelfn as af

def work(world, folder):
    Path(folder, f"pid-{world.rank}").write_text(str(os.getpid()))
    threading.Event().wait()

def launch():
    af.launch(2, work, sys.argv[1], device="cpu")

thread = threading.Thread(target=launch)
thread.start()
thread.join()
"""


@pytest.mark.parametrize("how", ["launcher", "caller"])
def test_ranks_end_with_a_launcher_that_is_killed(how, tmp_path):
    """A script's or a function's ranks are asked to end: those that can save have saved."""
    script = tmp_path / "calls.py"
    script.write_text(CALLS)
    command = {
        "launcher": [*LAUNCH, "--nproc", 2, SCRIPTS / "outlives.py"],
        "caller": [sys.executable, script],
    }[how]
    launcher, ranks = started(*command, tmp_path), list[int]()
    files = [tmp_path / f"pid-{rank}" for rank in range(2)]
    try:
        wait_until(lambda: all(f.exists() and f.read_text() for f in files))
        ranks += [int(file.read_text()) for file in files]
        assert not any(is_gone(pid) for pid in ranks)
        launcher.kill()
        assert launcher.wait() == -signal.SIGKILL
        wait_until(lambda: all(is_gone(pid) for pid in ranks))
    finally:
        launcher.kill()
        launcher.communicate()
        for pid in ranks:
            if not is_gone(pid):
                os.kill(pid, signal.SIGKILL)
    if how == "launcher":
        assert all((tmp_path / f"saved-{rank}").exists() for rank in range(2))


def test_a_rank_whose_launcher_is_gone_does_not_begin(tmp_path):
    """One that is started as its launcher is killed ends before the script's first line."""
    script = tmp_path / "writes.py"
    script.write_text("open('written', 'w')")
    worker = PACKAGE / "launching" / "worker.py"
    done = run(sys.executable, worker, os.getpid() + 1, script, cwd=tmp_path)
    assert done[0] == -signal.SIGTERM
    assert not (tmp_path / "written").exists()
