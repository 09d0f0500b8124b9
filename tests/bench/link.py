# SPDX-License-Identifier: Apache-2.0
"""Benchmark of an update over a slow link between two processes, and its prediction."""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from statistics import median

import attrs
import torch
import torch.distributed as dist
from figures import Figure
from local_sgd import SYNC_EVERY, local_by_accelerate
from loops import by_accelfn, by_hand
from models import adamw, in_turn, mlp
from rounds import Loop, compared, timed
from torch.nn.parallel import DistributedDataParallel

import accelfn as af
from accelfn.testing import Link, communication
from tests.hosts import sent_by, settled
from tests.ranks.programs_of_traffic import computed

SETUPS = {
    "accelfn wrap_ddp": af.wrap_ddp(),
    'accelfn compress("bf16")': af.chain(af.wrap_ddp(), af.compress_grads("bf16")),
    "accelfn local_sgd": af.local_sgd(sync_every=SYNC_EVERY),
    "accelfn diloco": af.diloco(sync_every=SYNC_EVERY),
    "accelfn diloco, 8 bits": af.diloco(sync_every=SYNC_EVERY, bits=8),
}
OVER_TCP = 1.5 * 66 / 1448


def measure(rounds: int) -> list[Figure]:
    """Measure the time of an update; both ranks run the same blocks in the same order."""
    with af.World.from_env() as world:
        # in a separate function, so that DDP's objects are freed before the process group
        return _measure(world, rounds)


def state_of(world: af.World, setup: object) -> af.TrainState:
    """Return the state that accelfn trains."""
    return af.TrainState.create(model=mlp, optimizer=adamw, setup=setup, world=world)


def _measure(world: af.World, rounds: int) -> list[Figure]:
    batches = in_turn(seed=world.rank)
    with ExitStack() as stack:
        loops: dict[str, Loop] = {
            "by hand, DDP": by_hand(DistributedDataParallel(mlp()), batches),
            **{
                name: by_accelfn(state_of(world, setup), batches)
                for name, setup in SETUPS.items()
            },
            "Accelerate LocalSGD": local_by_accelerate(mlp(), batches, stack),
        }
        taken = timed(loops, rounds=rounds, steps=SYNC_EVERY, fence=dist.barrier)
        figures = with_bytes(compared(taken), loops, world)
    return [foreseen(each) if each.contestant in SETUPS else each for each in figures]


def begun(world: af.World, setup: object) -> Callable[[], object]:
    """Return a function that runs a block of updates."""
    return partial(by_accelfn(state_of(world, setup), in_turn()), SYNC_EVERY)


def with_bytes(
    figures: Sequence[Figure], loops: Mapping[str, Loop], world: af.World
) -> list[Figure]:
    """Add the bytes of an update to the figures, from a block without timing."""
    cable = os.environ["GLOO_SOCKET_IFNAME"]
    found = []
    for figure in figures:
        dist.barrier()
        settled(cable)
        before = sent_by(cable)
        loops[figure.contestant](SYNC_EVERY)
        settled(cable)
        sent = torch.tensor(sent_by(cable) - before)
        num_bytes = af.all_reduce(sent, world, "sum").item() / SYNC_EVERY
        found.append(attrs.evolve(figure, num_bytes=num_bytes))
    return found


def foreseen(figure: Figure) -> Figure:
    """Add the predicted bytes and time of an update to the figure of an accelfn setup."""
    begin = partial(begun, setup=SETUPS[figure.contestant])
    traffic = communication(lambda world: begin(world)())
    compute = median(computed(begin)) / SYNC_EVERY
    megabits = float(os.environ["MEGABITS"])
    link = Link(latency=0.001, bandwidth=125_000 * megabits, overhead=OVER_TCP)
    sent = sum(traffic.bytes(2, algorithm="gloo").values()) / SYNC_EVERY
    seconds = traffic.seconds(link, ranks=2, algorithm="gloo", compute=compute)
    return attrs.evolve(
        figure, foreseen_bytes=sent * (1 + OVER_TCP), foreseen=1000 * seconds
    )
