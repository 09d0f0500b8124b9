# SPDX-License-Identifier: Apache-2.0
"""Benchmark of a test of DistributedDataParallel on simulated ranks and on real processes."""

import os
import socket
from functools import partial

import torch
import torch.distributed as dist
from figures import Figure
from rounds import compared, itself, timed
from torch import multiprocessing, nn
from torch.nn.parallel import DistributedDataParallel

from accelfn.testing import run_processes, simulate
from tests.internals import World


def measure(rounds: int) -> list[Figure]:
    """Measure the time of a test, and of a collective, in milliseconds."""
    tests = {f"simulated, {n} ranks": partial(simulated, n) for n in (2, 4, 8)}
    tests["Gloo processes, 2 kept from before"] = kept
    tests["Gloo processes, 2 spawned"] = spawned
    taken = timed(tests, rounds=rounds, steps=1)
    many = {"a simulated collective, 4 ranks": collectives}
    taken |= timed(many, rounds=rounds, steps=100)
    return compared(taken, how=itself)


def train(world: World) -> float:
    """Wrap a two-layer network in DistributedDataParallel, and run three steps."""
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    wrapped = DistributedDataParallel(model, process_group=world.group)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    rows = torch.randn(8, 16)
    for _ in range(3):
        optimizer.zero_grad()
        loss = wrapped(rows).square().mean()
        loss.backward()
        optimizer.step()
    return loss.item()


def simulated(size: int, times: int) -> None:
    """Run the test on simulated ranks."""
    for _ in range(times):
        simulate(size, train)


def collectives(times: int) -> None:
    """Call a number of collectives in one simulated world."""

    def body(world: World) -> None:
        numbers = torch.ones(3)
        for _ in range(times):
            dist.all_reduce(numbers, group=world.group)

    simulate(4, body)


def kept(times: int) -> None:
    """Run the test on Gloo processes that an earlier test has started."""
    for _ in range(times):
        run_processes(2, train)


def spawned(times: int) -> None:
    """Run the test on new Gloo processes."""
    for _ in range(times):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        multiprocessing.spawn(_spawned_rank, (port,), nprocs=2)


def _spawned_rank(rank: int, port: int) -> None:
    torch.set_num_threads(1)
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "WORLD_SIZE": "2",
    }
    with World.from_env() as world:
        train(world)
