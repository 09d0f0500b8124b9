# SPDX-License-Identifier: Apache-2.0
"""Read a process's rank and world size from its launcher's environment variables."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Final, NoReturn
from zlib import crc32

from attrs import evolve, frozen

from accelfn.errors import WorldError

Environment = Mapping[str, str]
THIS_MACHINE: Final = "127.0.0.1"


@frozen
class Place:
    """A process's rank and world size, as its launcher describes them.

    Attributes:
        launcher: the launcher's name, for errors.
        rank: the number of this process, from 0 to `size - 1`.
        local_rank: the number of this process among the `local_size` processes of its machine.
        node_rank: the number of its machine.
        address: the address at which rank 0 listens; like `port`, None for a single rank.
        attempt: how often the launcher has started the ranks again with the same store.
        has_store: whether the launcher listens at the address, instead of rank 0.
    """

    launcher: str
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node_rank: int = 0
    address: str | None = None
    port: int | None = None
    attempt: int = 0
    has_store: bool = False

    @property
    def is_alone(self) -> bool:
        """Whether this is the only rank, and the launcher has set no address."""
        return self.size == 1 and self.address is None


def check_place(place: Place, names: tuple[str, ...]) -> None:
    """Raise unless rank, size, local rank and local size fit together.

    Args:
        place: the place to check.
        names: the names of the variables with these four values, for the error.

    Raises:
        WorldError: the values contradict each other.
    """
    is_below = 0 <= place.rank < place.size
    if not is_below or not 0 <= place.local_rank < place.local_size <= place.size:
        values = place.rank, place.size, place.local_rank, place.local_size
        pairs = [f"{name}={value}" for name, value in zip(names, values, strict=True)]
        msg = f"{', '.join(pairs)} contradict each other: each rank must be below its size."
        raise WorldError(msg)


def _check_complete(env: Environment, names: Iterable[str], advice: str) -> None:
    """Raise unless the environment has all of these variables of a launcher."""
    present = [name for name in names if name in env]
    missing = [name for name in names if name not in env]
    if missing:
        msg = (
            f"The environment has {', '.join(present)} but lacks {', '.join(missing)}. Start"
            f" the ranks with {advice}, or train in one process with af.World.single()."
        )
        raise WorldError(msg)


def machine_of(env: Environment, place: Place) -> int:
    """Return the number of this machine.

    The number is the value of `GROUP_RANK` (torchrun) or `NODE_RANK` (Ray Train, Lightning).
    Without these variables it is computed, which is possible only if consecutive ranks fill
    machines with equally many ranks.

    Raises:
        WorldError: the ranks do not fill such machines, and neither variable is set.
    """
    for name in ("GROUP_RANK", "NODE_RANK"):
        if name in env:
            return integer(env, name)
    machine, rest = divmod(place.rank - place.local_rank, place.local_size)
    if rest or machine < 0 or place.size % place.local_size:
        msg = (
            f"Rank {place.rank} of {place.size} has local rank {place.local_rank} of"
            f" {place.local_size}. So either machines have different numbers of ranks, or the ranks"
            " of a machine are not consecutive, and accelfn cannot compute the machine's number."
            " Start mpirun with --map-by slot, or set GROUP_RANK to the machine's number (0, 1, …)."
        )
        raise WorldError(msg)
    return machine


def given_port(env: Environment) -> int:
    """Return the port in the environment variable MASTER_PORT."""
    port = integer(env, "MASTER_PORT")
    if not 0 <= port < 2**16:
        msg = f"The environment variable MASTER_PORT is {port}; expected 0 to 65535."
        raise WorldError(msg)
    return port


def derived_port(number: int) -> int:
    """Return a port below 32768, computed from a number; the system itself uses higher ports."""
    return 10_000 + number % 20_000


def integer(env: Environment, name: str, default: int | None = None) -> int:
    """Return the value of an environment variable as an integer, or a default without it.

    Raises:
        WorldError: the value is not an integer.
    """
    if default is not None and name not in env:
        return default
    try:
        return int(env[name])
    except ValueError:
        msg = f"The environment variable {name} is {env[name]!r}; expected an integer."
        raise WorldError(msg) from None


# The place of a process that mpirun started: of Open MPI, MVAPICH2, MPICH or Intel MPI.


@frozen
class Variables:
    """The environment variables that an MPI implementation sets."""

    launcher: str
    names: tuple[str, ...]  # the variables with rank, size, local rank and local size
    export: str  # the mpirun option that sets a variable on all ranks
    job: str | None = None  # the variable with the name of the run

    def is_meant(self, env: Environment) -> bool:
        """Return whether this mpirun started the process; SLURM also sets some PMI variables."""
        rank, size, local_rank, _ = self.names
        if rank == "PMI_RANK" and "SLURM_PROCID" in env:
            return local_rank in env
        return rank in env or size in env

    def address(self, _env: Environment) -> NoReturn:
        """Raise an error with the code to set rank 0's address."""
        msg = (
            f"{self.launcher} started ranks on several machines, but did not set an address for"
            " their rendezvous. Set MASTER_ADDR to the name of rank 0's machine:"
            f" {self.export.format('MASTER_ADDR', 'HOST')}."
        )
        raise WorldError(msg)

    def port(self, env: Environment) -> int:
        """Return a port for the run, computed from its name."""
        if self.job is not None and self.job in env:
            return derived_port(crc32(env[self.job].encode()))
        name = "" if self.job is None else f" ({self.job})"
        msg = (
            f"{self.launcher} started several ranks, but set no job name{name}, which accelfn"
            " needs to choose a port. Set MASTER_PORT to a free port of rank 0's machine:"
            f" {self.export.format('MASTER_PORT', 29500)}."
        )
        raise WorldError(msg)


_WORDS = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
MPI_VARIABLES: Final = (
    Variables(
        "Open MPI",
        tuple(f"OMPI_COMM_WORLD_{word}" for word in _WORDS),
        "mpirun -x {}={}",
        job="PMIX_NAMESPACE",
    ),
    Variables(
        "MVAPICH2",
        tuple(f"MV2_COMM_WORLD_{word}" for word in _WORDS),
        "mpirun_rsh ... {}={}",
    ),
    Variables(
        "MPICH or Intel MPI",
        ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
        "mpiexec -genv {} {}",
    ),
)


def place_by_mpi(env: Environment, variables: Variables) -> Place:
    """Return the place of this process from the variables of mpirun.

    Raises:
        WorldError: a variable is missing, malformed or contradicts another.
    """
    _check_complete(env, variables.names, f"the mpirun of {variables.launcher}")
    rank, size, local_rank, local_size = (
        integer(env, name) for name in variables.names
    )
    place = Place(variables.launcher, rank, size, local_rank, local_size)
    check_place(place, variables.names)
    place = evolve(place, node_rank=machine_of(env, place))
    return _with_address(env, place, variables.address, variables.port)


def _with_address(
    env: Environment,
    place: Place,
    find_address: Callable[[Environment], str],
    find_port: Callable[[Environment], int],
) -> Place:
    """Return the place with address and port added, if there are several ranks."""
    if place.size == 1:
        return place
    if "MASTER_ADDR" in env:
        address = env["MASTER_ADDR"]
    else:
        is_local = place.local_size == place.size
        address = THIS_MACHINE if is_local else find_address(env)
    port = given_port(env) if "MASTER_PORT" in env else find_port(env)
    return evolve(place, address=address, port=port)


# The place of a process that SLURM's srun started.


_STEP_SIZE = "SLURM_STEP_NUM_TASKS"
"""The variable with the number of tasks in a SLURM step; not set outside of a step."""


def place_by_slurm(env: Environment) -> Place:
    """Return the place of this process from the variables of srun.

    Raises:
        WorldError: a variable is missing, malformed or contradicts another; or srun did not
            start this process, although the job has several tasks.
    """
    refuse_unstarted_by_slurm(env)
    num_tasks = integer(env, _STEP_SIZE, 0)
    if num_tasks == 0 or (num_tasks == 1 and "SLURM_NTASKS" not in env):
        return Place("SLURM")  # this is the script of sbatch, or the shell of salloc
    names = ["SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NODEID"]
    _check_complete(env, names, "srun or `accelfn launch`")
    size = integer(env, "SLURM_NTASKS")
    rank, node_rank = integer(env, "SLURM_PROCID"), integer(env, "SLURM_NODEID")
    if "PMI_RANK" in env and integer(env, "PMI_RANK") != rank:
        msg = (
            f"SLURM_PROCID={rank} and PMI_RANK={env['PMI_RANK']} contradict each other."
        )
        raise WorldError(msg)
    per_node = _tasks_per_node(env)
    agree = size == num_tasks == sum(per_node)
    if not agree or not 0 <= node_rank < len(per_node):
        msg = (
            f"SLURM_NTASKS={size}, SLURM_STEP_NUM_TASKS={num_tasks}, SLURM_NODEID={node_rank}"
            f" and the tasks of each machine, {per_node}, contradict each other. Start the ranks"
            " with srun, which sets these variables."
        )
        raise WorldError(msg)
    local_rank = integer(env, "SLURM_LOCALID")
    place = Place("SLURM", rank, size, local_rank, per_node[node_rank], node_rank)
    check_place(place, (*names[:3], "tasks per node"))
    return _with_address(env, place, _first_machine, _port_of_job)


def refuse_unstarted_by_slurm(env: Environment) -> None:
    """Raise if a job has several tasks, and srun did not start this process."""
    # without SLURM_NTASKS, srun starts one task per machine
    name = "SLURM_NTASKS" if "SLURM_NTASKS" in env else "SLURM_JOB_NUM_NODES"
    num_tasks = integer(env, name, 1)
    if num_tasks > 1 and integer(env, _STEP_SIZE, 0) <= 1:
        msg = (
            f"{name}={num_tasks}, but srun did not start this process: it is the script of sbatch"
            " or the shell of salloc. Start the ranks in it with `srun` or `accelfn launch`, or"
            " train in one process with af.World.single()."
        )
        raise WorldError(msg)


def _of_step(env: Environment, *names: str) -> str:
    """Return the value of the first of these variables that is set."""
    for name in names:
        if name in env:
            return env[name]
    msg = (
        f"The environment has SLURM_PROCID but lacks {' and '.join(names)}. Start the ranks with"
        " srun, which sets SLURM's variables, or set one of these yourself."
    )
    raise WorldError(msg)


def _tasks_per_node(env: Environment) -> list[int]:
    """Return the number of tasks of each machine, from text such as `2(x3),1`: [2, 2, 2, 1]."""
    name = "SLURM_TASKS_PER_NODE"
    text = _of_step(env, "SLURM_STEP_TASKS_PER_NODE", name)
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            msg = f"The tasks per node, {name}, are {text!r}; expected text such as '2(x3),1'."
            raise WorldError(msg)
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _first_machine(env: Environment) -> str:
    """Return the first machine in a list such as `gpu[07-09,12],cpu1`: gpu07."""
    text = _of_step(env, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    first = re.match(r"(?:[^,\[\]]|\[[^\]]*\])+", text)
    name = re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0]) if first else ""
    if not re.fullmatch(r"[\w.-]+", name):
        msg = f"SLURM_NODELIST is {text!r}; expected a list such as gpu[07-09],cpu1."
        raise WorldError(msg)
    return name


def _port_of_job(env: Environment) -> int:
    """Return a port for the SLURM step: equal on its ranks, but different for other steps."""
    _of_step(env, "SLURM_JOB_ID", "MASTER_PORT")
    step = integer(env, "SLURM_STEP_ID", 0)
    return derived_port(integer(env, "SLURM_JOB_ID") + 1009 * step)


# The place of a process that torchrun or `accelfn launch` started.
#
# Ray Train and Kubeflow's PyTorchJob set all or some of the same variables.


def place_by_torchrun(env: Environment) -> Place:
    """Return the place of this process from the variables of torchrun.

    Raises:
        WorldError: a variable is missing, malformed or contradicts another.
    """
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    _check_complete(env, names, "torchrun or `accelfn launch`")
    rank, size = integer(env, "RANK"), integer(env, "WORLD_SIZE")
    if "LOCAL_RANK" not in env and "PET_NNODES" in env:
        local_rank, local_size = _only_rank_of_pod(env, size)
    else:  # without these variables all ranks are on one machine
        local_rank = integer(env, "LOCAL_RANK", rank)
        local_size = integer(env, "LOCAL_WORLD_SIZE", size)
    place = Place(
        "torchrun",
        rank,
        size,
        local_rank,
        local_size,
        address=env["MASTER_ADDR"],
        port=given_port(env),
        attempt=_attempt(env),
        has_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )
    check_place(place, ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    return evolve(place, node_rank=machine_of(env, place))


def refuse_unstarted_by_torchrun(env: Environment) -> None:
    """Raise if variables ask for several ranks, but torchrun did not start this process.

    Kubeflow sets these variables in each pod of a TrainJob, also if the pod runs Python directly.
    """
    variables = {
        name: env[name]
        for name in ("PET_NNODES", "PET_NPROC_PER_NODE")
        if env.get(name, "1").isdecimal() and int(env.get(name, "1")) > 1
    }
    if variables:
        listing = ", ".join(f"{name}={value}" for name, value in variables.items())
        msg = (
            f"{listing} asks torchrun for several ranks, but torchrun did not start this process."
            " Start the script with `torchrun train.py`, which reads these variables, or train in"
            " one process with af.World.single()."
        )
        raise WorldError(msg)


def _only_rank_of_pod(env: Environment, size: int) -> tuple[int, int]:
    """Return local rank 0 and local size 1, for Kubeflow pods that run Python directly."""
    pods = integer(env, "PET_NNODES")
    if pods != size:
        msg = (
            f"PET_NNODES={pods} and WORLD_SIZE={size}, so each pod has several ranks, but this"
            " process has no LOCAL_RANK. Start the ranks of each pod with `torchrun train.py`."
        )
        raise WorldError(msg)
    return 0, 1


def _attempt(env: Environment) -> int:
    """Return how often torchrun has restarted the ranks, if all attempts share one store.

    If each attempt has its own store, return 0: then the count may differ between machines,
    because each launcher counts the failures on its machine.
    """
    is_shared = env.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") != "1"
    return integer(env, "TORCHELASTIC_RESTART_COUNT", 0) if is_shared else 0


# The place of this process, from the variables of its launcher.
#
# torchrun and `accelfn launch`, MPI and SLURM set different variables. Ray Train and Kubeflow
# set torchrun's variables. A launcher's variables must be complete and must not contradict each
# other: accelfn guesses no value.


def read_place(env: Environment) -> Place | None:
    """Return the place that the environment describes; None without a launcher.

    If launchers are nested, the innermost counts. For example, mpirun may have started torchrun,
    and SLURM may have started mpirun.

    Raises:
        WorldError: a variable is missing, malformed or contradicts another.
    """
    if "RANK" in env or "WORLD_SIZE" in env:
        return place_by_torchrun(env)
    for variables in MPI_VARIABLES:
        if variables.is_meant(env):
            return place_by_mpi(env, variables)
    if "SLURM_PROCID" in env:
        return place_by_slurm(env)
    if "SLURM_JOB_ID" in env:  # the shell of salloc
        refuse_unstarted_by_slurm(env)
    refuse_unstarted_by_torchrun(env)
    return None


def asked_size(env: Environment) -> tuple[str, int]:
    """Return the name and value of the variable with the launcher's number of processes."""
    names = ["WORLD_SIZE", *(variables.names[1] for variables in MPI_VARIABLES)]
    if "SLURM_PROCID" in env:
        names.append(_STEP_SIZE)
    for name in names:
        if name in env:
            return name, integer(env, name)
    return "WORLD_SIZE", 1
