# SPDX-License-Identifier: Apache-2.0
"""The place of a process that SLURM's srun has started."""

from __future__ import annotations

import re

from attrs import evolve

from accelfn.errors import WorldError
from accelfn.world.place import (
    THIS_MACHINE,
    Environment,
    Place,
    check_place,
    derived_port,
    given_port,
    integer,
)


def place_of(env: Environment) -> Place:
    """Return the place that srun's variables give.

    Raises:
        WorldError: one is missing, malformed or contradicts another; or srun has started
            none of the tasks that were asked for.
    """
    refuse_unstarted(env)
    started = _started_by_srun(env)
    if started == 0 or (started == 1 and "SLURM_NTASKS" not in env):
        # the script of sbatch, or the shell that salloc makes a step of
        first = dict.fromkeys(("rank", "local_rank", "node_rank"), 0)
        return Place(launcher="SLURM", size=1, local_size=1, **first)
    names = ["SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NODEID"]
    if missing := [name for name in names if name not in env]:
        present = [name for name in names if name in env]
        msg = (
            f"The environment has {', '.join(present)} but lacks {', '.join(missing)}: srun"
            " sets them all. Start the ranks with srun or `accelfn launch`, or train in"
            " one process with af.World.single()."
        )
        raise WorldError(msg)
    size = integer(env, "SLURM_NTASKS")
    rank, node_rank = integer(env, "SLURM_PROCID"), integer(env, "SLURM_NODEID")
    if "PMI_RANK" in env and integer(env, "PMI_RANK") != rank:
        msg = (
            f"SLURM_PROCID={rank} and PMI_RANK={env['PMI_RANK']} contradict each other."
        )
        raise WorldError(msg)
    per_node = _tasks_per_node(env)
    agree = size == started == sum(per_node)
    if not agree or not 0 <= node_rank < len(per_node):
        msg = (
            f"SLURM_NTASKS={size}, SLURM_STEP_NUM_TASKS={started} and"
            f" SLURM_NODEID={node_rank} contradict each other or the tasks of each machine,"
            f" {per_node}."
        )
        raise WorldError(msg)
    place = Place(
        launcher="SLURM",
        rank=rank,
        size=size,
        local_rank=integer(env, "SLURM_LOCALID"),
        local_size=per_node[node_rank],
        node_rank=node_rank,
    )
    check_place(
        place, ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "tasks per node")
    )
    if size == 1:
        return place
    port = given_port(env) if "MASTER_PORT" in env else _port_of_job(env)
    if "MASTER_ADDR" in env:
        address = env["MASTER_ADDR"]
    else:
        address = THIS_MACHINE if place.local_size == size else _first_machine(env)
    return evolve(place, address=address, port=port)


def refuse_unstarted(env: Environment) -> None:
    """Raise where several tasks were asked for, and this is not one of several."""
    # srun starts one task a machine, unless told how many
    name = "SLURM_NTASKS" if "SLURM_NTASKS" in env else "SLURM_JOB_NUM_NODES"
    asked = integer(env, name) if name in env else 1
    if asked > 1 and _started_by_srun(env) <= 1:
        msg = (
            f"{name}={asked}, but this is no rank of srun's: it is the script of sbatch or"
            " the shell of salloc, one process whatever was asked for. Start the ranks in"
            " it with `srun` or `accelfn launch`, or train in one process with"
            " af.World.single()."
        )
        raise WorldError(msg)


def _started_by_srun(env: Environment) -> int:
    """Return how many tasks the step has that this process is of; 0 where it is of none."""
    name = "SLURM_STEP_NUM_TASKS"
    return integer(env, name) if name in env else 0


def _of_step(env: Environment, *names: str) -> str:
    """Return the first variable that is set."""
    for name in names:
        if name in env:
            return env[name]
    msg = f"The environment has SLURM_PROCID but lacks {' and '.join(names)}."
    raise WorldError(msg)


def _tasks_per_node(env: Environment) -> list[int]:
    """Read how many tasks each machine has, as in `2(x3),1`: three machines with two, one."""
    text = _of_step(env, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if found is None:
            msg = f"SLURM_TASKS_PER_NODE is {text!r}; expected such as '2(x3),1'."
            raise WorldError(msg)
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def _first_machine(env: Environment) -> str:
    """Read the first name of a list such as `gpu[07-09,12],cpu1`."""
    text = _of_step(env, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    first = re.match(r"(?:[^,\[\]]|\[[^\]]*\])+", text)
    name = re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0]) if first else ""
    if not re.fullmatch(r"[\w.-]+", name):
        msg = f"SLURM_NODELIST is {text!r}, of which no first machine can be read."
        raise WorldError(msg)
    return name


def _port_of_job(env: Environment) -> int:
    """Return a port that all ranks of a step agree on, and other steps rarely have."""
    if "SLURM_JOB_ID" not in env:
        msg = "The environment has SLURM_PROCID but lacks SLURM_JOB_ID and MASTER_PORT."
        raise WorldError(msg)
    step = integer(env, "SLURM_STEP_ID") if "SLURM_STEP_ID" in env else 0
    return derived_port(integer(env, "SLURM_JOB_ID") + 1009 * step)
