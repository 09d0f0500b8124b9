# SPDX-License-Identifier: Apache-2.0
"""Ranks that a real srun has started, and processes of sbatch and salloc, which it has not."""

import shutil
import sys
from collections.abc import Iterator, Mapping

import pytest

from tests.ports import free_port
from tests.ranks import slurm
from tests.ranks.commands import (
    AGREES,
    LAUNCH,
    ONE_MACHINE,
    TRAINS,
    ended,
    places,
    started,
)
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.ranks(2),
    pytest.mark.skipif(bool(slurm.MISSING), reason=f"no {', '.join(slurm.MISSING)}"),
]
TWO_MACHINES = ["0 of 2, 0 of 1 on machine 0", "1 of 2, 0 of 1 on machine 1"]
REFUSED = "WorldError: SLURM_NTASKS=2, but srun did not start"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, str]]:
    with slurm.running(tmp_path_factory.mktemp("slurm")) as env:
        yield env


def run(name: str, words: list[str], env: Mapping[str, str]) -> tuple[int, str, str]:
    """Run one of Slurm's commands."""
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
