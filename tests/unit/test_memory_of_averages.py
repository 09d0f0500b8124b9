# SPDX-License-Identifier: Apache-2.0
"""What training apart takes beside the model, and what an average takes at its peak."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import accelfn as af
from accelfn.testing import simulate
from tests.internals import average_

MIB = 1 << 20
SGD = partial(torch.optim.SGD, lr=0.01)


def net() -> nn.Module:
    """Return eight layers of equal size."""
    return nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(8)))


SIZE = sum(param.numel() * 4 for param in net().parameters())


@pytest.mark.parametrize(
    ("setup", "times"),
    [
        (af.local_sgd(sync_every=4), 0),
        (af.diloco(sync_every=4, outer=partial(torch.optim.SGD, lr=1.0)), 1),  # anchor
        (af.diloco(sync_every=4), 2),  # and momentum
        (af.diloco(sync_every=4, bits=8), 3),  # and what rounding has left over
        (af.diloco(sync_every=4, bits=4), 3),
        # and the fragment that is on its way
        (af.diloco(sync_every=4, fragments=4, delay=1), 2.25),
        (af.diloco(sync_every=4, fragments=4, delay=1, bits=8), 3.0625),
    ],
)
def test_what_training_apart_takes(setup, times):
    """At any update it is no more than the anchor, the momentum, the error, a fragment."""

    def train(world):
        state = af.TrainState.create(model=net, optimizer=SGD, setup=setup, world=world)
        step = af.make_step(lambda model, batch: model(batch).square().mean())
        most = 0
        for _ in range(12):
            state, _ = step(state, torch.ones(1, 32))
            most = max(most, sum(s.here for s in af.memory(state).slots.values()))
        return most

    for most in simulate(2, train).results:
        assert times * SIZE <= most <= times * SIZE + 64  # and some numbers


class Largest(TorchDispatchMode):
    """Sees the largest tensor that is made while it is entered."""

    num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Call an operation, and look at the memory of what it returns."""
        made = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tensors_in((args, kwargs))}
        for each in tensors_in(made):
            storage = each.untyped_storage()
            if storage.data_ptr() not in given:
                self.num_bytes = max(self.num_bytes, storage.nbytes())
        return made


def tensors_in(values):
    """Return the tensors among arguments, or results."""
    return [each for each in tree_leaves(values) if isinstance(each, torch.Tensor)]


@pytest.mark.parametrize("cap", [0.002, 0.01, 0.5])
def test_an_average_takes_its_bucket(cap):
    """No tensor that an average makes is larger than the bucket, and the weight at its end."""

    def average(world):
        params = [torch.full((32, 32), float(world.rank)) for _ in range(8)]
        with Largest() as seen:
            average_(params, 1, world, label="an average", bucket_cap_mb=cap)
        assert all(bool((each == 0.5).all()) for each in params)
        return seen.num_bytes

    for num_bytes in simulate(2, average).results:
        assert 0 < num_bytes <= min(cap * MIB, 8 * 4096) + 4
