# SPDX-License-Identifier: Apache-2.0
"""However a rank goes, all others of real ranks end, and say which it was."""

import os
import signal
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import attrs
import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import accelfn as af
from tests.internals import connection
from tests.ports import free_port
from tests.processes import ranks_alone
from tests.waiting import HANGS

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


GONE = "failed, left or did not arrive"
HOW = {
    "raise": "rank {} raised ValueError: boom",
    "leave": "rank {} left",
    "kill": f"rank {{}} {GONE}",
    "stop": f"rank {{}} {GONE}",
    "hang": f"rank {{}} {GONE}",
}


def outcomes(size: int, calls: list[str], fault: Fault, opens: str) -> list[str]:
    """Return how each rank but the one that goes ends, in a world of new processes."""
    args = size, free_port(), calls, fault, opens
    with ranks_alone(size, live, *args) as ranks:
        others = [each for i, each in enumerate(ranks) if i != fault.rank]
        return [r.pipe.recv() if r.pipe.poll(HANGS) else "hangs" for r in others]


@pytest.mark.ranks(4)
@settings(
    max_examples=10, phases=[Phase.explicit, Phase.reuse, Phase.generate]
)  # each costs processes, and a timeout of two seconds
@given(
    size=st.integers(2, 4),
    calls=st.lists(st.sampled_from(sorted(CALLS)), min_size=1, max_size=4),
    how=st.sampled_from(sorted(HOW)),
    opens=st.sampled_from(["accelfn", "torch"]),
    data=st.data(),
)
def test_a_rank_that_goes_is_named_by_all(
    size: int, calls: list[str], how: str, opens: str, data: st.DataObject
) -> None:
    """Any program, rank, call and way to go, whoever opened the group: nothing hangs."""
    fault = Fault(
        rank=data.draw(st.integers(0, size - 1), label="rank"),
        at=data.draw(st.integers(0, len(calls) - 1), label="call"),
        how=how,
    )
    # a rank that only sends needs nobody: at the end all do
    said = outcomes(size, [*calls, "barrier"], fault, opens)
    names = {HOW[how].format(fault.rank)}
    if opens == "torch" and how == "leave":  # such a world is not closed by its block
        names = {f"rank {fault.rank} {GONE}"}
    if fault.rank == 0:  # it keeps the store by which others are heard
        names |= {f"rank 0 or another rank {GONE}", f"rank 0 {GONE}"}
    for text in said:
        assert text.startswith("PeerFailedError: Rank ")
        assert any(f", but {name}" in text for name in names), text
