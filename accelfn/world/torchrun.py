# SPDX-License-Identifier: Apache-2.0
"""The place of a process that torchrun or `accelfn launch` has started.

Ray Train and Kubeflow's PyTorchJob say it in the same words, or in some of them.
"""

from __future__ import annotations

from attrs import evolve

from accelfn.errors import WorldError
from accelfn.world.place import Environment, Place, given_port, integer, machine_of


def place_of(env: Environment) -> Place:
    """Return the place that torchrun's variables give.

    Raises:
        WorldError: one is missing, malformed or contradicts another.
    """
    present = [name for name in ("RANK", "WORLD_SIZE") if name in env]
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if name not in env]
    if missing:
        msg = (
            f"The environment has {' and '.join(present)} but lacks"
            f" {', '.join(missing)}. Start the ranks with torchrun or `accelfn launch`,"
            " which set them all, or unset them to train in one process."
        )
        raise WorldError(msg)
    rank, size = integer(env, "RANK"), integer(env, "WORLD_SIZE")
    if size < 1 or not 0 <= rank < size:
        msg = (
            f"RANK={rank} and WORLD_SIZE={size} contradict each other: expected 0 <="
            " RANK < WORLD_SIZE."
        )
        raise WorldError(msg)
    if "LOCAL_RANK" not in env and "PET_NNODES" in env:
        local_rank, local_size = _only_one_of_pod(env, size)
    else:  # by hand a rank need not be told that all are on one machine
        local_rank = integer(env, "LOCAL_RANK") if "LOCAL_RANK" in env else rank
        name = "LOCAL_WORLD_SIZE"
        local_size = integer(env, name) if name in env else size
    if not 0 <= local_rank < local_size <= size:
        msg = (
            f"LOCAL_RANK={local_rank}, LOCAL_WORLD_SIZE={local_size}"
            f" and WORLD_SIZE={size} contradict each other: expected 0 <= LOCAL_RANK <"
            " LOCAL_WORLD_SIZE <= WORLD_SIZE."
        )
        raise WorldError(msg)
    place = Place(
        launcher="torchrun",
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        node_rank=0,
        address=env["MASTER_ADDR"],
        port=given_port(env),
        attempt=_attempt(env),
        has_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )
    return evolve(place, node_rank=machine_of(env, place))


def refuse_unstarted(env: Environment) -> None:
    """Raise where torchrun was told of several processes, and has not started this one.

    Kubeflow tells it so: a pod of a TrainJob that runs Python by itself trains alone.
    """
    asked = {
        name: env[name]
        for name in ("PET_NNODES", "PET_NPROC_PER_NODE")
        if env.get(name, "1").isdecimal() and int(env.get(name, "1")) > 1
    }
    if asked:
        shown = ", ".join(f"{name}={value}" for name, value in asked.items())
        msg = (
            f"{shown} tells torchrun to start several ranks, but this is none of them:"
            " Python was started without it. Start the script with `torchrun train.py`,"
            " which reads the variables, or train in one process with"
            " af.World.single()."
        )
        raise WorldError(msg)


def _only_one_of_pod(env: Environment, size: int) -> tuple[int, int]:
    """Return local rank and size where Kubeflow numbers the pods, and Python runs in each."""
    pods = integer(env, "PET_NNODES")
    if pods != size:
        msg = (
            f"PET_NNODES={pods} and WORLD_SIZE={size}: the pods are to have several ranks"
            " each, but this process has no LOCAL_RANK. Start the script with `torchrun"
            " train.py`, which starts them all."
        )
        raise WorldError(msg)
    return 0, 1


def _attempt(env: Environment) -> int:
    """Return which attempt of a launcher this is, where several share a store.

    Launchers count those that failed on their machine: with a store for each attempt they
    need not agree.
    """
    name = "TORCHELASTIC_RESTART_COUNT"
    is_shared = env.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") != "1"
    return integer(env, name) if is_shared and name in env else 0
