# SPDX-License-Identifier: Apache-2.0
"""A real Slurm of two machines, which are both this one: its daemons, started and ended."""

import os
import pwd
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.ports import free_port
from tests.waiting import HANGS

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
