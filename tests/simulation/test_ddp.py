# SPDX-License-Identifier: Apache-2.0
"""The real DistributedDataParallel on simulated groups, against averaging by hand."""

# not every program needs all that it is given; schedules are no secrets
# ruff: noqa: ARG001, ARG005, S311

import random
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accelfn.testing import Corrupt, simulate
from tests.budget import at_night

STEPS = 3
LR = 2.0**-5


class Net(nn.Module):
    """Layers with small integers, of which some may not be used, and a counting buffer."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 4, dtype=torch.float64)
        self.between = nn.Linear(4, 4, dtype=torch.float64)
        self.last = nn.Linear(4, 2, dtype=torch.float64)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        with torch.no_grad():
            for i, parameter in enumerate(self.parameters()):
                parameter.copy_(integers(parameter.shape, i))

    def forward(self, x, *, through=True, count=1):
        self.seen += count
        hidden = self.first(x).relu()
        if through:
            hidden = self.between(hidden)
        return self.last(hidden)


def integers(shape, seed):
    """Return integers from -2 to 2, the same ones for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator).double()


def batch(rank, step, part=0):
    """Return what a rank learns from."""
    return integers((2, 3), 1000 * rank + 10 * step + part)


def passes(rank, step, *, parts=1, through=lambda rank, step: True):
    """Return the arguments of the model in one step of a rank."""
    used = through(rank, step)
    return [(batch(rank, step, part), used) for part in range(parts)]


def by_hand(size, steps=lambda rank: STEPS, **program):
    """Return the parameters after gradients were averaged by hand."""
    net = Net()
    for step in range(max(map(steps, range(size)))):
        for rank in range(size):
            if step >= steps(rank):
                continue
            for x, used in passes(rank, step, **program):
                net(x, through=used).sum().backward()
        for parameter in net.parameters():
            if parameter.grad is not None:
                parameter.grad /= size
        torch.optim.SGD(net.parameters(), LR).step()
        net.zero_grad()
    return [each.detach() for each in net.parameters()]


def by_ddp(world, *, options, steps=lambda rank: STEPS, join=False, **program):
    """Return the parameters after DistributedDataParallel averaged gradients."""
    model = DistributedDataParallel(Net(), process_group=world.group, **options)
    optimizer = torch.optim.SGD(model.parameters(), LR)
    with model.join() if join else nullcontext():
        for step in range(steps(world.rank)):
            given = passes(world.rank, step, **program)
            for i, (x, used) in enumerate(given):
                with model.no_sync() if i + 1 < len(given) else nullcontext():
                    model(x, through=used).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [each.detach() for each in model.module.parameters()]


def on_one_rank(rank, step):
    """Use the extra layer on a rank, and not on others."""
    return (rank + step) % 2 == 0


def at_times(rank, step):
    """Use the extra layer on all ranks, or on none."""
    return step != 1


PROGRAMS = {
    "plain": {"options": {}},
    "no_sync": {"options": {}, "parts": 3},
    "unused on a rank": {
        "options": {"find_unused_parameters": True},
        "through": on_one_rank,
    },
    "unused on all": {"options": {"find_unused_parameters": True}, "through": at_times},
    "unused, no_sync": {
        "options": {"find_unused_parameters": True},
        "through": on_one_rank,
        "parts": 2,
    },
    "bucket views": {"options": {"gradient_as_bucket_view": True}},
    "bucket views, no_sync": {"options": {"gradient_as_bucket_view": True}, "parts": 2},
    "tiny buckets": {"options": {"bucket_cap_mb": 1e-5}},
    "tiny buckets, unused": {
        "options": {"bucket_cap_mb": 1e-5, "find_unused_parameters": True},
        "through": on_one_rank,
    },
    "static graph": {"options": {"static_graph": True}},
    "no buffers": {"options": {"forward_sync_buffers": False}},
    "uneven": {"options": {}, "steps": lambda rank: 1 + rank, "join": True},
    "uneven, tiny buckets": {
        "options": {"bucket_cap_mb": 1e-5},
        "steps": lambda rank: 3 - rank % 3,
        "join": True,
    },
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_ddp_is_averaging_by_hand(name):
    """All ranks hold it bit for bit, and the log is the same, whatever the schedule."""
    program, wanted, logs = PROGRAMS[name], {}, {}
    hand = {k: v for k, v in program.items() if k not in ("options", "join")}
    for i in range(1000 if at_night() else 12):
        draw = random.Random(i)
        size = draw.choice((1, 2, 2, 4))
        schedule = [draw.randrange(size) for _ in range(draw.randrange(60))]
        run = simulate(size, lambda world: by_ddp(world, **program), schedule=schedule)
        if size not in wanted:
            wanted[size], logs[size] = by_hand(size, **hand), run.log
        assert logs[size] == run.log
        assert all(all(map(torch.equal, wanted[size], found)) for found in run)


def test_integers_of_ddp_are_never_corrupted():
    """It reads memory at the places that its buckets' indices tell, and they stay true."""
    program = PROGRAMS["tiny buckets"]
    log = simulate(1, lambda world: by_ddp(world, **program)).log
    numbers = [at for at, entry in enumerate(log) if "int" in str(entry)]
    assert len(numbers) > 2
    for at in numbers:
        for element in range(4):
            fault = Corrupt(0, at, element=element)
            run = simulate(1, lambda world: by_ddp(world, **program), faults=[fault])
            assert run.missed == (fault,)
