# SPDX-License-Identifier: Apache-2.0
"""Which rank of how many this process is, as its launcher says in the environment.

torchrun and `accelfn launch`, MPI and SLURM each say it in their own words, and Ray Train
and Kubeflow in those of torchrun. The words of one launcher must be complete and agree with
each other; what is missing is not guessed.
"""

from __future__ import annotations

from accelfn.world import mpi, slurm, torchrun
from accelfn.world.place import Environment, Place, integer


def read_place(env: Environment) -> Place | None:
    """Return the place that the environment describes; None where no launcher has.

    The innermost launcher is believed: torchrun may itself have been started by mpirun, and
    mpirun by SLURM.

    Raises:
        WorldError: a variable is missing, malformed or contradicts another.
    """
    if "RANK" in env or "WORLD_SIZE" in env:
        return torchrun.place_of(env)
    for words in mpi.WORDS:
        if words.is_meant(env):
            return mpi.place_of(env, words)
    if "SLURM_PROCID" in env:
        return slurm.place_of(env)
    if "SLURM_JOB_ID" in env:  # the shell of salloc
        slurm.refuse_unstarted(env)
    torchrun.refuse_unstarted(env)
    return None


def asked_size(env: Environment) -> tuple[str, int]:
    """Return how many processes a launcher has started, and the variable that says so."""
    names = ["WORLD_SIZE", *(words.size for words in mpi.WORDS)]
    if "SLURM_PROCID" in env:
        names.append("SLURM_STEP_NUM_TASKS")
    for name in names:
        if name in env:
            return name, integer(env, name)
    return "WORLD_SIZE", 1
