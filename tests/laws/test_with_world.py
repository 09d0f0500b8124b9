# SPDX-License-Identifier: Apache-2.0
"""A state moved to another world is the one that was saved and loaded there, bitwise."""

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

import accelfn as af
from accelfn.errors import DeadlockError
from accelfn.testing import simulate
from tests.internals import elastic
from tests.laws.alive import Alive
from tests.laws.worlds import params
from tests.strategies import Run, differences, runs, tensors

SETUPS = {
    "ddp": (af.wrap_ddp(find_unused_parameters=True), af.ema(0.5)),
    "powersgd": (
        af.wrap_ddp(),
        af.compress_grads("powersgd", start_powerSGD_iter=0, min_compression_rate=0),
    ),
    "local sgd": (af.local_sgd(sync_every=3), af.clip_grad_norm(0.5)),
    "diloco": (af.diloco(sync_every=4, fragments=2, delay=1, bits=8),),
    "fsdp": (af.wrap_fsdp(), af.ema(0.5)),
}


class Counting:
    """A user's own object, which has a state."""

    def __init__(self, number: int) -> None:
        self.number = number

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.number = state["number"]


WORLDS = [  # ranks in all, ranks that have a state, ranks that go on together
    *[(2, 2, 2), (2, 2, 1), (2, 1, 2), (3, 3, 1), (3, 1, 3)],
    *[(4, 4, 2), (4, 2, 4), (4, 2, 2), (6, 3, 2), (6, 2, 3)],
]


@given(
    run=runs(),
    kind=st.sampled_from(["plain", "tied", "norm", "dropout"]),
    setup=st.sampled_from(sorted(SETUPS)),
    sizes=st.sampled_from(WORLDS),
    at=st.integers(0, 4),
)
@example(Run(n=24, optimizer="adamw"), "plain", "fsdp", (4, 4, 2), 2)
@example(Run(n=24, optimizer="adamw"), "dropout", "diloco", (6, 2, 3), 3)
def test_a_state_that_is_moved_was_saved_and_loaded(run, kind, setup, sizes, at):
    """On more, fewer or as many ranks it is what a load gives them, and goes on so."""
    chosen = af.chain(af.shard_data(), *SETUPS[setup])
    # batch norm needs two samples on every rank
    run = attrs.evolve(
        run, kind=kind, setup=chosen, n=max(run.n, 24), batch_size=12, dyadic=False
    )
    total, givers, size = sizes

    def fn(world: af.World) -> list[list[str]]:
        old, new = world.split(size=givers), world.split(size=size)
        gives = world.rank < givers
        state = run.state(old).with_slot("own", Counting(5 * gives))
        if gives:
            state, _ = run.train(state, at)
            af.save(state, to)
        af.barrier(world)
        loaded = af.load(run.state(new).with_slot("own", Counting(0)), to)
        among = None if size == total else world
        moved = af.with_world(state, new, among=among, newcomer=not gives)
        assert moved.world is new
        assert moved.slots["own"].number == loaded.slots["own"].number == 5
        same, had = differences(tensors(loaded), tensors(moved)), tensors(state.copy())
        ends = [tensors(run.train(each, 2)[0]) for each in (loaded, moved)]
        return [same, differences(*ends), differences(had, tensors(state))]

    with tempfile.TemporaryDirectory() as folder:
        to = str(Path(folder) / "saved")
        assert simulate(total, fn).results == ([[], [], []],) * total


@given(layers=st.integers(3, 12), size=st.integers(2, 3), most=st.integers(9, 40))
def test_small_tensors_are_handed_over_together(layers, size, most):
    """All calls of a rank that gives but the last have as many bytes as go together."""

    def fn(world: af.World) -> None:
        state = af.TrainState.create(
            model=lambda: nn.Sequential(*(nn.Linear(1, 1) for _ in range(layers))),
            optimizer=partial(torch.optim.SGD, lr=0.1),
            world=world,
        )
        af.with_world(state, world)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(elastic, "_AT_ONCE", most)
        log = simulate(size, fn).log
    given_ = [each for each in log if each.label == "with_world: hand over"]
    for root in range(size):
        *full, last = [each.num_bytes for each in given_ if each.root == root] or [1]
        assert all(each >= most for each in full)
        assert last > 0


class Deep(nn.Module):
    """Layers of equal size."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


WIDTH = 64
LAYER = 4 * WIDTH * WIDTH
OWN = {
    "alike": (af.wrap_ddp(),),
    "apart": (af.local_sgd(sync_every=9),),
    "apart with averages": (af.local_sgd(sync_every=9), af.ema(0.5)),
    "split": (af.wrap_fsdp(),),
}


OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "adamw": partial(torch.optim.AdamW, lr=0.1),
}


@given(
    layers=st.integers(6, 12),
    setup=st.sampled_from(sorted(OWN)),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    sizes=st.sampled_from([each for each in WORLDS if each[0] <= 4]),
)
@example(8, "apart", "adamw", (4, 4, 4))
@example(8, "apart", "adamw", (4, 4, 2))
@example(8, "split", "adamw", (4, 4, 4))
@example(8, "split", "adamw", (4, 2, 4))
def test_a_rank_holds_what_it_goes_on_with(layers, setup, optimizer, sizes):
    """At the peak a move has made what the rank gets, as much again, and a few tensors,
    whether ranks have the same, each its own, or parts, and however many go on. Of a model
    that is split it makes room for the parameters first, and parts that are cut otherwise it
    holds as they were.
    """
    total, givers, size = sizes

    def fn(world: af.World) -> tuple[int, ...]:
        old, new = world.split(size=givers), world.split(size=size)
        state = af.TrainState.create(
            model=partial(Deep, layers),
            optimizer=OPTIMIZERS[optimizer],
            setup=af.chain(*OWN[setup]),
            world=old,
        )
        state = stepped(state, world.rank)
        with Alive() as alive:
            moved = af.with_world(
                state,
                new,
                among=None if size == total else world,
                newcomer=world.rank >= givers,
            )
        had, gets = af.memory(state), af.memory(moved)
        return alive.most, had.total.here, gets.total.here, gets.params.here

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(elastic, "_AT_ONCE", 1)
        ranks = simulate(total, fn).results
    for most, _, gets, room in ranks:
        allowed = 2 * gets + 3 * LAYER
        if setup == "split":
            allowed += room + (givers != size) * max(had for _, had, _, _ in ranks)
        assert gets <= most <= allowed


def stepped(state: af.TrainState, rank: int) -> af.TrainState:
    """Return a state after two updates on what is a rank's own."""

    def loss_fn(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return net(x).square().mean()

    step = af.make_step(loss_fn)
    for _ in range(2):
        state, _ = step(state, torch.full((1, WIDTH), 1.0 + rank))
    return state


@given(size=st.integers(3, 4), bad=st.integers(0, 3))
def test_who_can_take_nothing_lets_it_pass(size: int, bad: int) -> None:
    """A newcomer that fails with most still to arrive keeps nobody waiting, and tells all."""
    bad %= size

    def fn(world: af.World) -> str:
        is_new = world.rank == bad
        state = af.TrainState.create(
            model=partial(Deep, 3),
            optimizer=OPTIMIZERS["sgd"],
            setup=af.wrap_ddp() if is_new else af.local_sgd(sync_every=9),
            world=world.split(size=1),
        )
        state = state if is_new else stepped(state, world.rank)
        with pytest.raises(af.errors.Error) as raised:
            af.with_world(state, world, newcomer=is_new)
        return str(raised.value)

    for rank, text in enumerate(simulate(size, fn)):
        told = f"rank {bad} of {size} could not receive the state"
        assert (told in text) is (rank != bad)


COPIES = {"dp_replicate": 2, "dp_shard": 2}


def apart(world: af.World, at: int) -> af.TrainState:
    """Return the state of copies of two ranks each, which train apart, after some updates."""
    setup = af.chain(af.shard_data(), af.wrap_fsdp(), af.local_sgd(sync_every=9))
    run = Run(n=24, batch_size=8, dyadic=False, optimizer="momentum", setup=setup)
    return run.train(run.state(world), at)[0]


@given(at=st.sampled_from([0, 2]), copy=st.integers(0, 1))
def test_a_copy_that_is_left_is_what_all_go_on_from(at: int, copy: int) -> None:
    """Where all ranks of the other copy are new, what one copy holds is all there is."""

    def fn(world: af.World) -> tuple[bool, dict[str, torch.Tensor]]:
        stays = world.rank // 2 == copy
        state = apart(world, at)  # what newcomers have of it is not looked at
        had = params(tensors(state))
        moved = af.with_world(state, world, newcomer=not stays)
        assert moved.step == at
        found = params(tensors(moved))
        return not stays or differences(had, found) == [], found

    ranks = simulate(4, fn, axes=COPIES)
    assert all(same for same, _ in ranks)
    for rank, (_, found) in enumerate(ranks):
        assert differences(ranks[(rank + 2) % 4][1], found) == []


def test_parts_of_a_model_that_are_gone_are_missed():
    """Ranks that have not all of a model between them are told so, and go on nowhere."""

    def fn(world: af.World) -> None:
        state = apart(world, 1)
        with pytest.raises(af.errors.StateError, match="do not have all of its parts"):
            af.with_world(state, world.across(size=2))

    simulate(4, fn, axes=COPIES)


@given(size=st.integers(2, 4), bad=st.integers(0, 3), gives=st.booleans())
def test_a_rank_that_fails_is_told_of_on_all(size: int, bad: int, gives: bool) -> None:
    """Whatever a rank cannot say or take, no rank goes on as if nothing had been."""
    bad %= size

    def fn(world: af.World) -> str:
        run = Run(n=12, optimizer="adamw" if world.rank == bad else "sgd")
        state = run.state(world)
        if gives and world.rank == bad:
            state = attrs.evolve(state, slots={"mine": object()})
        newcomer = not gives and world.rank == bad
        with pytest.raises(af.errors.Error) as raised:
            af.with_world(state, world, newcomer=newcomer)
        return str(raised.value)

    for rank, text in enumerate(simulate(size, fn)):
        assert rank == bad or f"rank {bad} of {size} could not" in text


def test_what_a_rank_lacks_is_refused():
    """A world that is none, one that is no part, no state at all, and no word of its own."""

    def fn(world: af.World) -> None:
        state = Run(n=12).state(world)
        not_a_world: Any = 2
        with pytest.raises(
            af.errors.ArgumentError, match=r"expected an af\.World, got 2"
        ):
            af.with_world(state, not_a_world)
        with pytest.raises(af.errors.ArgumentError, match="is not a part of the world"):
            af.with_world(state, af.World(), among=world)
        with pytest.raises(af.errors.StateError, match="all 2 ranks are newcomers"):
            af.with_world(state, world, newcomer=True)
        own = state.with_slot("mine", world.rank)
        assert af.with_world(own, world).slots["mine"] == world.rank
        with pytest.raises(
            af.errors.CheckpointError, match=r"2 ranks that had different slots\.mine"
        ):
            af.with_world(own, world.split(size=1), among=world)

    simulate(2, fn)


def test_a_rank_that_does_not_call_is_missed():
    """The others are told who did not come, and in what they waited."""

    def fn(world: af.World) -> None:
        state = Run(n=12).state(world)
        if world.rank:
            af.with_world(state, world)

    with pytest.raises(DeadlockError, match="with_world: describe its state"):
        simulate(2, fn)
