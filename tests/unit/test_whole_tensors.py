# SPDX-License-Identifier: Apache-2.0
"""Whole tensors: what a user cuts in another way than layouts do, and what calls are called."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import accelfn as af
from accelfn import collectives
from accelfn.testing import simulate

SGD = partial(torch.optim.SGD, lr=0.1)
AXES = {"dp_replicate": 2, "dp_shard": 2}


def begun(world, *setup, **kw):
    return af.TrainState.create(
        model=lambda: nn.Linear(3, 5, dtype=torch.float64),
        optimizer=SGD,
        setup=af.chain(*(setup or (af.wrap_fsdp(),))),
        world=world,
        **kw,
    )


@pytest.mark.parametrize(
    "placements",
    [
        (Shard(0), Shard(0)),
        (Replicate(), Partial()),
        (Partial(), Shard(1)),
        (Shard(1), Replicate()),
    ],
)
def test_what_a_user_cuts_is_what_torch_gathers(placements):
    """Parts of parts from the left, and summands, beside parts as layouts cut them."""

    def fn(world):
        state = begun(world)
        part = torch.arange(6.0).view(2, 3) + world.rank
        mine = DTensor.from_local(part, world.mesh, placements, run_check=False)
        tensors = {"mine": mine, **state.params}
        found = collectives.wholes(tensors, world, label="whole")
        for name, tensor in tensors.items():
            assert torch.equal(tensor.full_tensor(), found[name])

    simulate(4, fn, axes=AXES)


def lent(state, _folder):
    with af.bind(state, gather=True):
        pass


class Pretrained(nn.Linear):
    """Has a method to write itself."""

    def save_pretrained(self, directory):
        torch.save(self.state_dict(), directory / "all.pt")


WHOLES = {
    "af.full_params": lambda state, _: af.full_params(state),
    "af.frozen": lambda state, _: af.frozen(state),
    "af.bind": lent,
    "gather what is exported": lambda state, folder: af.export_model(
        state, folder / "a"
    ),
    "lay out anew": lambda state, _: state.with_setup(af.chain(af.wrap_ddp())),
}


@pytest.mark.parametrize("label", WHOLES)
def test_a_gather_says_what_it_is_for(label, tmp_path):
    """One call for the whole model; a rank that waits in vain is told in which."""

    def fn(world, *, leaves=False):
        state = begun(world)
        if not (leaves and world.rank):
            WHOLES[label](state, tmp_path / f"{leaves}")

    (tmp_path / "False").mkdir()
    (tmp_path / "True").mkdir()
    log = simulate(2, fn).log
    assert [each.label for each in log].count(label) == 1
    with pytest.raises(af.errors.DeadlockError, match=f"{label}|export: begin"):
        simulate(2, partial(fn, leaves=True))


def test_what_a_model_writes_by_itself_is_gathered_at_once(tmp_path):
    """`save_pretrained` takes one call, too."""

    def fn(world):
        state = af.TrainState.create(
            model=lambda: Pretrained(3, 5),
            optimizer=SGD,
            setup=af.chain(af.wrap_fsdp()),
            world=world,
        )
        af.save_pretrained(state, tmp_path / "model")
        return af.full_params(state)

    run = simulate(2, fn)
    assert [e.label for e in run.log].count("gather what is exported") == 1
    written = torch.load(tmp_path / "model" / "all.pt")
    assert all(torch.equal(run[0][name], written[name]) for name in written)
