# SPDX-License-Identifier: Apache-2.0
"""How a model lies over the ranks changes none of its numbers."""

import tempfile
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import accelfn as af
from accelfn.errors import LawError
from accelfn.testing import assert_states_equal, quantities, simulate
from tests.internals import is_shard, local, tensor_leaves
from tests.laws.split_models import LOSSES, Run, runs
from tests.strategies import differences, tensors

Found = dict[str, torch.Tensor]


@attrs.frozen
class Lying:
    engine: object
    axes: dict[str, int]

    @property
    def size(self) -> int:
        return prod(self.axes.values())

    @property
    def splits(self) -> bool:
        return isinstance(self.engine, af.wrap_fsdp) and self.axes["dp_shard"] > 1

    def on_ranks(self, fn: Any) -> list[Any]:
        """Return what a function of a world gives on each rank."""
        if self.size == 1:
            return [fn(af.World.single(device="cpu"))]
        return list(simulate(self.size, fn, axes=self.axes))


def axes(size: int) -> dict[str, int]:
    return {"dp_shard": size}


FSDP = [af.wrap_fsdp(), af.wrap_fsdp(torch.nn.Linear)]
LAYOUTS = [
    Lying(None, axes(1)),
    *(Lying(engine, axes(size)) for engine in FSDP for size in (1, 2, 3, 4)),
    *(Lying(af.wrap_ddp(), axes(size)) for size in (2, 3, 4)),
    *(Lying(engine, {"dp_replicate": 2, "dp_shard": 2}) for engine in FSDP),
]
layouts = st.sampled_from(LAYOUTS)


def stepped(run: Run, state: af.TrainState, updates: int) -> af.TrainState:
    step = af.make_step(LOSSES[run.loss])
    for batch in run.batches(state, updates):
        state, _ = step(state, batch)
    return state


@example(
    run=Run(4, 4, "mean", "adamw", in_list=True, micro=1),
    one=LAYOUTS[0],
    other=LAYOUTS[2],
    updates=1,
    frozen="hash",
    begun=True,
)
@example(  # copies of parts are saved once
    run=Run(4, 4, "mean", "adamw", in_list=True, micro=1),
    one=LAYOUTS[-1],
    other=LAYOUTS[3],
    updates=1,
    frozen="write",
    begun=False,
)
@given(
    run=runs(),
    one=layouts,
    other=layouts,
    updates=st.integers(0, 2),
    frozen=st.sampled_from(["write", "hash"]),
    begun=st.booleans(),
)
def test_what_is_saved_in_one_layout_is_loaded_in_another(
    run, one, other, updates, frozen, begun
):
    """Parameters, buffers, optimizer state and averages, bitwise, on all ranks, which go on
    from there alike; and exports from either have the same bytes. Frozen parameters may be
    saved by their hashes alone.
    """
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)

        def save(world):
            state = stepped(run, run.state(world, one.engine), updates)
            af.save(state, place / "saved", frozen=frozen)
            af.export_model(state, place / "one", at="train")
            return tensors(state), tensors(stepped(run, state, 1))

        def load(world):
            state = run.state(world, other.engine)
            if begun:  # what it had before has no say
                state = stepped(run, state, 1)
            state = af.load(state, place / "saved")
            af.export_model(state, place / "other", at="train")
            return tensors(state), tensors(stepped(run, state, 1))

        (saved, after), *_ = one.on_ranks(save)
        for rank, (loaded, further) in enumerate(other.on_ranks(load)):
            if rank:  # buffers of the first rank count
                loaded["buffers.seen"] = saved["buffers.seen"]
            assert differences(saved, loaded) == []
            del further["buffers.seen"]  # where ranks see less, they are of less
            alike = {name: after[name] for name in further}
            assert differences(alike, further, within=1e-9) == []
        exports = [place / name / "model.safetensors" for name in ("one", "other")]
        assert exports[0].read_bytes() == exports[1].read_bytes()


def of_every_kind(state: af.TrainState) -> dict[str, Any]:
    """Return values by parameters' names in all that may stand in a slot."""

    def moments():
        return {n: p.detach().clone() for n, p in state.params.items() if p.ndim}

    return {
        "list": [moments(), 3],
        "tuple": (moments(),),
        "deeper": {n: {"m": [each]} for n, each in moments().items()},
        "pending": af.Pending.of({"sums": moments(), "weight": 2}),
    }


@given(
    run=runs(),
    there=st.sampled_from([af.wrap_fsdp(), *FSDP, af.wrap_ddp()]),
    back=st.sampled_from([af.wrap_ddp(), af.wrap_fsdp()]),
    size=st.integers(2, 4),
    updates=st.integers(0, 2),
)
def test_another_setup_and_back_changes_nothing(run, there, back, size, updates):
    """A state's numbers are the same bits in another layout; the state itself stays; and what
    comes back trains on as what never went.
    """

    def leaves(state):
        return tensor_leaves([state.params, state.opt_state, state.slots])

    def fn(world):
        state = stepped(run, run.state(world, back), updates)
        state = state.with_slot("mine", of_every_kind(state))
        home, before = state.setup, tensors(state)
        setup = partial(af.chain, af.shard_data())
        behind = (af.accumulate(num_micro_batches=run.micro), *run.behind)
        moved = state.with_setup(setup(there, *behind))
        assert differences(before, tensors(moved)) == []
        cut = {is_shard(leaf) for leaf in leaves(moved) if leaf.ndim}
        assert cut == {there.name == "wrap_fsdp"}
        returned = moved.with_setup(home)
        assert differences(before, tensors(returned)) == []
        assert differences(before, tensors(state)) == []
        elsewhere = tensors(stepped(run, moved.copy(), 1))
        further, stayed = (stepped(run, each, 1) for each in (returned, state.copy()))
        after = tensors(stayed)
        assert differences(after, tensors(further)) == []
        assert differences(after, elsewhere, within=1e-9) == []

    simulate(size, fn)


@given(run=runs(), wrap=st.sampled_from(FSDP), size=st.integers(2, 4))
def test_the_kit_compares_what_is_split(run, wrap, size):
    """`quantities` are whole; `assert_states_equal` finds a bit of a rank's part."""

    def fn(world):
        state = stepped(run, run.state(world, wrap), 1)
        replica = stepped(run, run.state(world, af.wrap_ddp()), 1)
        one, other = (quantities(each)["params"] for each in (state, replica))
        assert differences(one, other, within=1e-12) == []
        assert_states_equal(state, state.copy())
        moved = state.copy()
        part = local(moved.params["first.weight"])
        part += 1
        if part.numel():
            with pytest.raises(LawError, match="first.weight"):
                assert_states_equal(state, moved)

    simulate(size, fn)
