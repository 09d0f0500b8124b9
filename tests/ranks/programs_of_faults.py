# SPDX-License-Identifier: Apache-2.0
"""Programs of collectives in which a rank goes, in worlds that ranks open themselves."""

import os
import signal
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import attrs
import torch
import torch.distributed as dist

import accelfn as af
from tests.internals import connection

SECONDS = 3.0

CALLS: dict[str, Callable[[af.World], Any]] = {
    "reduce": lambda world: af.all_reduce(torch.ones(3), world),
    "gather": lambda world: af.all_gather({"a": torch.ones(2)}, world),
    "broadcast": lambda world: af.broadcast(torch.ones(2), world),
    "gather_objects": lambda world: af.all_gather_objects([world.rank], world),
    "all_to_all": lambda world: af.all_to_all([torch.ones(1)] * world.size, world),
    "scatter": lambda world: af.scatter([0] * world.size, world),
    "mean": lambda world: (af.Metrics({"loss": (torch.ones(()), 1.0)})).all_reduce_mean(
        world
    ),
    "any_rank": lambda world: af.any_rank(flag=False, world=world),
    "barrier": af.barrier,
}


@attrs.frozen
class Fault:
    """A rank that goes before a call, in some way."""

    rank: int
    at: int
    how: str


def go(how: str) -> None:
    """Go, unless it is to leave in peace."""
    match how:
        case "raise":
            msg = "boom"
            raise ValueError(msg)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "hang":
            time.sleep(600)


def live(
    rank: int,
    size: int,
    port: int,
    calls: Sequence[str],
    fault: Fault,
    opens: str,
    pipe: Connection,
) -> None:
    """Make the calls on one rank, and send how that ended."""
    torch.set_num_threads(1)
    # all that live speak, however busy the machine
    connection._ANSWERS_WITHIN = connection._LINGERS = 2 * SECONDS
    place = {"RANK": rank, "WORLD_SIZE": size, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    if opens == "torch":
        dist.init_process_group("gloo", timeout=timedelta(seconds=SECONDS))
    world = af.World.from_env(device="cpu", timeout=60)
    world.connection.set_timeout(SECONDS)  # from here on, once all have met
    said = "returned"
    try:
        with world:
            af.barrier(world)  # all have opened it
            for i, name in enumerate(calls):
                if (rank, i) == (fault.rank, fault.at):
                    go(fault.how)
                    break
                CALLS[name](world)
    except (ValueError, af.errors.Error) as error:
        said = f"{type(error).__name__}: {error}"
    if opens == "torch":
        calls_roll = world.connection.roll_call
        if calls_roll is not None:  # whoever opened the group keeps its store as long
            calls_roll.linger()
        dist.destroy_process_group()
    world.close()  # as the interpreter's end would
    pipe.send(said)
