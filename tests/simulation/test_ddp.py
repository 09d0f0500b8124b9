# SPDX-License-Identifier: Apache-2.0
"""The real DistributedDataParallel on simulated groups, against averaging by hand."""

from functools import partial

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accelfn.testing import Corrupt, simulate

LR = 2.0**-5
TINY = 1e-5
"""Buckets of a parameter each, in MB."""


class Net(nn.Module):
    """Layers with small integers."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 4, dtype=torch.float64)
        self.last = nn.Linear(4, 2, dtype=torch.float64)
        with torch.no_grad():
            for i, parameter in enumerate(self.parameters()):
                parameter.copy_(integers(parameter.shape, i))

    def forward(self, x):
        return self.last(self.first(x).relu())


def integers(shape, seed):
    """Return integers from -2 to 2, the same ones for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator).double()


def batch(rank, step):
    """Return what a rank learns from."""
    return integers((2, 3), 1000 * rank + 10 * step)


def by_hand(steps):
    """Return the parameters after gradients were averaged by hand."""
    net = Net()
    for step in range(max(steps)):
        for rank, count in enumerate(steps):
            if step < count:
                net(batch(rank, step)).sum().backward()
        for parameter in net.parameters():
            parameter.grad /= len(steps)
        torch.optim.SGD(net.parameters(), LR).step()
        net.zero_grad()
    return [each.detach() for each in net.parameters()]


def by_ddp(world, steps, bucket_cap_mb=None):
    """Return the parameters after DistributedDataParallel averaged gradients."""
    model = DistributedDataParallel(
        Net(), process_group=world.group, bucket_cap_mb=bucket_cap_mb
    )
    optimizer = torch.optim.SGD(model.parameters(), LR)
    with model.join():
        for step in range(steps[world.rank]):
            model(batch(world.rank, step)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [each.detach() for each in model.module.parameters()]


@given(
    steps=st.sampled_from([1, 2, 4]).flatmap(
        lambda size: st.lists(st.integers(1, 3), min_size=size, max_size=size)
    ),
    bucket_cap_mb=st.sampled_from([None, TINY]),
    schedule=st.lists(st.integers(0, 3), max_size=60),
)
def test_ranks_of_uneven_data_join(steps, bucket_cap_mb, schedule):
    """All ranks hold it bit for bit, and the log is the same, whatever the schedule."""
    train = partial(by_ddp, steps=steps, bucket_cap_mb=bucket_cap_mb)
    run = simulate(len(steps), train, schedule=schedule)
    wanted = by_hand(steps)
    assert all(all(map(torch.equal, wanted, found)) for found in run)
    assert run.log == simulate(len(steps), train).log


def test_integers_of_ddp_are_never_corrupted():
    """It reads memory at the places that its buckets' indices tell, and they stay true."""
    train = partial(by_ddp, steps=[3], bucket_cap_mb=TINY)
    log = simulate(1, train).log
    numbers = [at for at, entry in enumerate(log) if "int" in str(entry)]
    assert len(numbers) > 2
    for at in numbers:
        for element in range(4):
            fault = Corrupt(0, at, element=element)
            assert simulate(1, train, faults=[fault]).missed == (fault,)
