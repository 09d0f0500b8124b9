# SPDX-License-Identifier: Apache-2.0
"""Slots keep what transforms put into them: whole beside parts, and copies of the state."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import accelfn as af
from accelfn.testing import simulate
from tests.internals import is_shard


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


@af.transform
class Keeps:
    """Keeps in its slot what a state holds, as one field sees it from some call on."""

    field: str
    part: str
    first: int
    is_copied: bool

    def init(self, state):
        return self._slot("init", state, {"calls": -1})

    def grads(self, grads, slot, update):
        return grads, self._slot("grads", update.state, slot)

    def hyper(self, hyper, slot, update):
        return {}, self._slot("hyper", update.state, slot)

    def after_update(self, state, slot, update):
        return state, self._slot("after_update", state, slot)

    def finalize(self, state, slot, update):
        return state, self._slot("finalize", state, slot)

    def _slot(self, field, state, slot):
        if field not in (self.field, "init"):
            return slot
        calls, held = slot["calls"] + 1, {}
        if field == self.field and (field == "init" or calls >= self.first):
            held = {
                n: self._kept(each) for n, each in getattr(state, self.part).items()
            }
        return {"calls": calls, "held": held}

    def _kept(self, each):
        if not isinstance(each, torch.Tensor):
            return {name: self._kept(inner) for name, inner in each.items()}
        return each.clone() if self.is_copied else each


@given(
    field=st.sampled_from(["init", "grads", "hyper", "after_update", "finalize"]),
    part=st.sampled_from(["params", "buffers", "opt_state"]),
    first=st.integers(1, 3),
    is_copied=st.booleans(),
)
def test_a_slot_of_the_state_s_own_tensors_is_refused(field, part, first, is_copied):
    """The update after it would change what the slot is to remember; copies are as they were."""
    keeps = Keeps(field, part=part, first=first, is_copied=is_copied)
    own = part != "opt_state" or field != "init"  # no optimizer has any yet

    def train():
        state = af.TrainState.create(
            model=nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)),
            optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.5),
            setup=keeps,
        )
        step = af.make_step(lambda model, x: model(x).square().mean())
        for _ in range(6):
            state, _ = step(state, torch.randn(4, 2))
        for _ in range(4):
            state = af.finalize(state)

    if is_copied or not own:
        train()
    else:
        with pytest.raises(af.errors.StateError, match=r"Keeps\(.*itself, not a copy"):
            train()


def test_a_slot_may_have_what_no_update_writes():
    """A frozen parameter is the same ever after."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model[0].requires_grad_(requires_grad=False)

    @af.transform
    class Frozen:
        def init(self, state):
            return {"0.weight": state.params["0.weight"]}

    af.TrainState.create(model=model, optimizer=torch.optim.SGD, setup=Frozen())
