# SPDX-License-Identifier: Apache-2.0
"""The place of a process that torchrun or `accelfn launch` has started."""

from __future__ import annotations

from accelfn.errors import WorldError
from accelfn.world.place import Environment, Place, given_port, integer


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
    local_rank = integer(env, "LOCAL_RANK") if "LOCAL_RANK" in env else rank
    local_size = integer(env, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in env else size
    if not 0 <= local_rank < local_size <= size:
        msg = (
            f"LOCAL_RANK={local_rank}, LOCAL_WORLD_SIZE={local_size}"
            f" and WORLD_SIZE={size} contradict each other: expected 0 <= LOCAL_RANK <"
            " LOCAL_WORLD_SIZE <= WORLD_SIZE."
        )
        raise WorldError(msg)
    return Place(
        launcher="torchrun",
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        node_rank=integer(env, "GROUP_RANK") if "GROUP_RANK" in env else 0,
        address=env["MASTER_ADDR"],
        port=given_port(env),
        attempt=_attempt(env),
        has_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _attempt(env: Environment) -> int:
    """Return which attempt of a launcher this is, where several share a store.

    Launchers count those that failed on their machine: with a store for each attempt they
    need not agree.
    """
    name = "TORCHELASTIC_RESTART_COUNT"
    is_shared = env.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") != "1"
    return integer(env, name) if is_shared and name in env else 0
