# SPDX-License-Identifier: Apache-2.0
"""Ranks that a real mpirun has started: Open MPI's, and MPICH's where it is installed."""

import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.ports import free_port
from tests.ranks.commands import AGREES, ONE_MACHINE, TRAINS, ended, places, started

MPIRUN = Path(sys.executable).with_name("mpirun")  # of the package openmpi
HYDRA = shutil.which("mpiexec.hydra")

pytestmark = pytest.mark.ranks(2)
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
