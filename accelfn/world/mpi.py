# SPDX-License-Identifier: Apache-2.0
"""The place of a process that an mpirun has started: Open MPI's, MVAPICH2's or MPICH's."""

from __future__ import annotations

from typing import Final
from zlib import crc32

from attrs import evolve, frozen

from accelfn.errors import WorldError
from accelfn.world.place import (
    THIS_MACHINE,
    Environment,
    Place,
    check_place,
    derived_port,
    given_port,
    integer,
    machine_of,
)


@frozen
class Words:
    """What an implementation of MPI calls the place of a process."""

    launcher: str
    rank: str
    size: str
    local_rank: str
    local_size: str
    export: str  # how its mpirun hands {} to all ranks
    job: str | None = None  # what is the same for all ranks of a run, and for no other

    @property
    def names(self) -> tuple[str, str, str, str]:
        """All of them."""
        return self.rank, self.size, self.local_rank, self.local_size

    def is_meant(self, env: Environment) -> bool:
        """Whether an mpirun has started this process; SLURM speaks PMI too, but not all."""
        if self.rank == "PMI_RANK" and "SLURM_PROCID" in env:
            return self.local_rank in env
        return self.rank in env or self.size in env


_OPEN_MPI: Final = Words(
    "Open MPI",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "mpirun -x {}={}",
    job="PMIX_NAMESPACE",
)
_MVAPICH: Final = Words(
    "MVAPICH2",
    "MV2_COMM_WORLD_RANK",
    "MV2_COMM_WORLD_SIZE",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "MV2_COMM_WORLD_LOCAL_SIZE",
    "mpirun_rsh ... {}={}",
)
_PMI: Final = Words(
    "MPICH or Intel MPI",
    "PMI_RANK",
    "PMI_SIZE",
    "MPI_LOCALRANKID",
    "MPI_LOCALNRANKS",
    "mpiexec -genv {} {}",
)
WORDS = (_OPEN_MPI, _MVAPICH, _PMI)


def place_of(env: Environment, words: Words) -> Place:
    """Return the place that an mpirun's variables give.

    Raises:
        WorldError: one is missing, malformed or contradicts another.
    """
    missing = [name for name in words.names if name not in env]
    if missing:
        present = [name for name in words.names if name in env]
        msg = (
            f"The environment has {', '.join(present)} but lacks {', '.join(missing)}:"
            f" {words.launcher} sets them all. Start the ranks with its mpirun, or unset"
            " them to train in one process."
        )
        raise WorldError(msg)
    rank, size, local_rank, local_size = (integer(env, name) for name in words.names)
    place = Place(
        launcher=words.launcher,
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        node_rank=0,
    )
    check_place(place, words.names)
    place = evolve(place, node_rank=machine_of(env, place))
    if size == 1:
        return place
    address = _address(env, words, place)
    return evolve(place, address=address, port=_port_of_run(env, words, place))


def _address(env: Environment, words: Words, place: Place) -> str:
    if "MASTER_ADDR" in env:
        return env["MASTER_ADDR"]
    if place.local_size == place.size:
        return THIS_MACHINE
    msg = (
        f"{words.launcher} started {place.size} ranks on several machines, but does not"
        " say where rank 0 listens; give MASTER_ADDR, the name of its machine:"
        f" {words.export.format('MASTER_ADDR', 'HOST')}."
    )
    raise WorldError(msg)


def _port_of_run(env: Environment, words: Words, place: Place) -> int:
    if "MASTER_PORT" in env:
        return given_port(env)
    if words.job is not None and words.job in env:
        return derived_port(crc32(env[words.job].encode()))
    name = "" if words.job is None else f" ({words.job})"
    msg = (
        f"{words.launcher} started {place.size} ranks, but gives the run no name{name} that"
        " a port could follow from; give MASTER_PORT, one that is free where rank 0 runs:"
        f" {words.export.format('MASTER_PORT', 29500)}."
    )
    raise WorldError(msg)
