# SPDX-License-Identifier: Apache-2.0
"""Ranks that a real mpirun or srun has started, and processes of sbatch and salloc."""

import os
import pwd
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.ports import free_port
from tests.ranks.commands import (
    AGREES,
    LAUNCH,
    ONE_MACHINE,
    TRAINS,
    ended,
    places,
    started,
)
from tests.waiting import HANGS, wait_until

pytestmark = pytest.mark.ranks(2)

# mpirun

MPIRUN = Path(sys.executable).with_name("mpirun")  # of the package openmpi
HYDRA = shutil.which("mpiexec.hydra")

open_mpi = pytest.mark.skipif(not MPIRUN.exists(), reason="no package openmpi")
mpich = pytest.mark.skipif(HYDRA is None, reason="MPICH is not installed")


def mpirun(*words: str):
    """Start two ranks; as root, and with fewer cores than ranks, if need be."""
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return started(MPIRUN, "--oversubscribe", "-n", "2", *words, **allowed)


def mpiexec(*words: str):
    return started(HYDRA, *words)


@open_mpi
def test_runs_of_mpirun_meet_without_settings():
    """Two runs at once on a machine each find their own ranks, which agree."""
    for code, out, error in ended(mpirun(*AGREES), mpirun(*AGREES)):
        assert code == 0, error
        assert places(out) == ONE_MACHINE


@open_mpi
@pytest.mark.parametrize(("how", "code"), [("raise", 1), ("kill", 137)])
def test_a_rank_that_fails_ends_the_run_of_mpirun(how: str, code: int) -> None:
    """mpirun ends as the rank did, whose words are to be read, and no other has trained."""
    ((found, out, error),) = ended(mpirun(*TRAINS, how))
    assert found == code
    assert "done" not in out
    assert how != "raise" or "ValueError: boom on rank 1" in error


@mpich
def test_ranks_of_mpich_agree():
    """A port is all that ranks of one machine must be given."""
    port = ["-genv", "MASTER_PORT", str(free_port())]
    ((code, out, error),) = ended(mpiexec(*port, "-n", "2", *AGREES))
    assert code == 0, error
    assert places(out) == ONE_MACHINE


@mpich
def test_mpich_does_not_say_where_to_meet():
    """Without a port the run ends at once, and says what to write."""
    ((code, out, error),) = ended(mpiexec("-n", "2", *AGREES))
    assert code != 0
    assert out == ""
    assert re.search(
        "WorldError: .* Set MASTER_PORT.*: mpiexec -genv MASTER_PORT", error
    )


# A real Slurm of two machines, which are both this one: its daemons, started and ended.

NEEDED = ("slurmctld", "slurmd", "srun", "sbatch", "salloc", "sinfo", "squeue")
MISSING = [name for name in NEEDED if shutil.which(name) is None]

_CONFIGURATION = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
MailProg=/bin/true
FirstJobId={port}
PartitionName=all Nodes=ALL Default=YES
"""
# ranks look for the first by its name
_MACHINES = ("127.0.0.1", "127.0.0.2")


@contextmanager
def running(folder: Path) -> Iterator[Mapping[str, str]]:
    """Start Slurm in an empty folder, and yield the environment of its commands.

    Skip, with its last words, where one of its daemons ends.
    """
    port, *others = (free_port() for _ in range(3))
    host = socket.gethostname().partition(".")[0]
    user = pwd.getpwuid(os.getuid()).pw_name
    text = _CONFIGURATION.format(host=host, port=port, user=user, folder=folder)
    for name, at in zip(_MACHINES, others, strict=True):
        there = f"NodeHostname={host} NodeAddr=127.0.0.1 Port={at}"
        text += f"NodeName={name} {there} CPUs=4 State=UNKNOWN\n"
    (folder / "slurm.conf").write_text(text)
    (folder / "state").mkdir()
    env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
    with ExitStack() as stack:
        commands = [["slurmd", "-D", "-N", name] for name in _MACHINES]
        commands.insert(0, ["slurmctld", "-D", "-c"])
        daemons = [stack.enter_context(_daemon(words, env)) for words in commands]
        _wait(folder, env, daemons)
        yield env


@contextmanager
def _daemon(
    words: list[str], env: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    nowhere = subprocess.DEVNULL
    daemon = subprocess.Popen(
        [shutil.which(words[0]) or words[0], *words[1:]],
        env=env,
        stdin=nowhere,
        stdout=nowhere,
        stderr=nowhere,
    )
    try:
        yield daemon
    finally:
        daemon.terminate()
        try:
            daemon.wait(timeout=5)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()


def _wait(
    folder: Path, env: Mapping[str, str], daemons: list[subprocess.Popen[bytes]]
) -> None:
    """Wait until all machines are idle."""
    words = [shutil.which("sinfo") or "sinfo", "--noheader", "--Node", "--format=%T"]
    until = time.monotonic() + HANGS
    while time.monotonic() < until and all(each.poll() is None for each in daemons):
        found = subprocess.run(
            words, env=env, capture_output=True, text=True, check=False
        )
        if found.stdout.split() == ["idle"] * len(_MACHINES):
            return
        time.sleep(0.1)
    logs = [each.read_text().splitlines()[-1:] for each in folder.glob("*.log")]
    pytest.skip(f"Slurm does not start here: {logs}")


TWO_MACHINES = ["0 of 2, 0 of 1 on machine 0", "1 of 2, 0 of 1 on machine 1"]
REFUSED = "WorldError: SLURM_NTASKS=2, but srun did not start"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, str]]:
    if MISSING:
        pytest.skip(f"no {', '.join(MISSING)}")
    with running(tmp_path_factory.mktemp("slurm")) as env:
        yield env


def run(name: str, words: list[str], env: Mapping[str, str]) -> tuple[int, str, str]:
    (found,) = ended(started(shutil.which(name), *words, **env))
    return found


def wait(job: str, env: Mapping[str, str]) -> None:
    """Wait for the end of a script; sbatch itself would look again ever more rarely."""
    wait_until(lambda: not run("squeue", ["--noheader", "--job", job], env)[1])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["-n", "2"], ONE_MACHINE),
        (["-N", "2", "--ntasks-per-node=1", "--mpi=pmi2"], TWO_MACHINES),
    ],
)
def test_ranks_of_srun_agree(cluster, options, expected):
    """srun says all that ranks need, on one machine or two, and beside its own PMI."""
    code, out, error = run("srun", [*options, *AGREES], cluster)
    assert code == 0, error
    assert places(out) == expected


def test_a_rank_that_fails_ends_the_run_of_srun(cluster):
    """srun ends as the rank did, whose words are to be read, and no other has trained."""
    code, out, error = run("srun", ["-n", "2", *TRAINS, "raise"], cluster)
    assert code == 1
    assert "done" not in out
    assert "ValueError: boom on rank 1" in error


def test_a_script_of_sbatch(cluster, tmp_path):
    """The script itself is refused; what it starts by srun or `accelfn launch` trains."""
    alone = "import accelfn as af; print(af.World.single().size); af.World.from_env()"
    commands = [
        *([sys.executable, "-c", f'"{alone}"'], ["srun", *AGREES]),
        [*LAUNCH, "--nproc", "2", AGREES[1]],
    ]
    outputs = [tmp_path / str(number) for number in range(len(commands))]
    lines = [
        f"{' '.join(words)} > {output} 2>&1; echo $?"
        for words, output in zip(commands, outputs, strict=True)
    ]
    script, codes = tmp_path / "script.sh", tmp_path / "codes"
    script.write_text("\n".join(["#!/bin/bash", *lines, ""]))
    asked = ["--parsable", "-n", "2", "-o", str(codes), str(script)]
    code, job, error = run("sbatch", asked, cluster)
    assert code == 0, error
    wait(job.strip(), cluster)
    itself, by_srun, launched = (output.read_text() for output in outputs)
    assert codes.read_text().split() == ["1", "0", "0"], by_srun + launched
    assert itself.startswith("1\n")
    assert REFUSED in itself
    assert places(by_srun) == places(launched) == ONE_MACHINE


@pytest.mark.parametrize("within", [[], ["srun", "--interactive", "--preserve-env"]])
def test_a_shell_of_salloc(cluster, within):
    """What is started in it trains as one process where one was asked for, or not at all."""
    code, out, error = run("salloc", ["-n", "2", *within, *AGREES], cluster)
    assert (code, out) == (1, "")
    assert REFUSED in error
    code, out, error = run("salloc", [*within, *AGREES], cluster)
    assert code == 0, error
    assert places(out) == ["0 of 1, 0 of 1 on machine 0"]


def test_a_launcher_on_each_machine(cluster, tmp_path):
    """Ranks of `accelfn launch` are what it says, though srun has started the launchers."""
    script = tmp_path / "script.sh"
    meets = f"--main-address 127.0.0.1 --main-port {free_port()}"
    machine = "--num-machines 2 --machine-rank $SLURM_NODEID"
    launch = f"{' '.join(LAUNCH)} --nproc 1 {machine} {meets} {AGREES[1]}"
    script.write_text(f"#!/bin/bash\nexec {launch}\n")
    script.chmod(0o755)
    options = ["-N", "2", "--ntasks-per-node=1"]
    code, out, error = run("srun", [*options, str(script)], cluster)
    assert code == 0, error
    assert places(out) == TWO_MACHINES
