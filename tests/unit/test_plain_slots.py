# SPDX-License-Identifier: Apache-2.0
"""What a transform keeps whole beside a model in parts stays whole."""

from functools import partial

import pytest
import torch
from torch import nn

import accelfn as af
from accelfn.base.shards import is_shard
from accelfn.testing import simulate


def begun(world, *setup, seed=0):
    return af.TrainState.create(
        model=lambda: nn.Linear(3, 5, dtype=torch.float64),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        setup=af.chain(*setup),
        world=world,
        seed=seed,
    )


@af.transform
class Remembers:
    """Keeps a plain tensor under a parameter's name."""

    def init(self, state):
        return {"weight": torch.full((5, 3), 0.5, dtype=torch.float64)}


@pytest.mark.parametrize("before", [af.wrap_fsdp(), af.wrap_ddp()])
@pytest.mark.parametrize("partial_load", [False, True])
def test_what_a_transform_keeps_whole_is_loaded_whole(tmp_path, before, partial_load):
    """Though it stands under a parameter's name and has its shape."""

    def save(world):
        af.save(begun(world, before, Remembers()), tmp_path / "saved")

    def load(world):
        state = begun(world, af.wrap_fsdp(), Remembers(), seed=1)
        if partial_load:
            loaded = af.load_part(state, tmp_path / "saved", only="slots").state
        else:
            loaded = af.load(state, tmp_path / "saved")
        for each in (state, loaded):
            (kept,) = each.slots.values()
            assert not is_shard(kept["weight"])
            assert kept["weight"].eq(0.5).all()
        assert is_shard(loaded.params["weight"])

    simulate(2, save)
    simulate(2, load)
