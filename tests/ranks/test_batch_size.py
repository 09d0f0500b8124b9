# SPDX-License-Identifier: Apache-2.0
"""Real processes agree on a batch size, wherever one of them runs out of memory."""

import importlib
import importlib.util
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

import accelfn as af
from accelfn.testing import simulate
from tests.internals import engine_of
from tests.laws.split_models import LOSSES, Run
from tests.laws.test_batch_size import PLACES, SIGNS, Full, train
from tests.processes import RankError, run_ranks
from tests.strategies import differences, tensors


def search(
    world: af.World, fits: list[int], start: int, place: str
) -> tuple[list[int], dict[str, torch.Tensor]]:
    """Return what was tried, and the state that was found, which goes on once."""
    tried = []

    def fn(batch_size: int, inner: af.World) -> af.TrainState:
        tried.append(batch_size)
        return train(batch_size, inner, batch_size > fits[world.rank], place)

    state = af.find_batch_size(fn, start, world)
    step = af.make_step(lambda model, batch: model(batch[0]).square().mean())
    state, _ = step(state, next(iter(af.batches(state))))
    af.barrier(world)
    return tried, tensors(state)


def fail_on_one(world: af.World) -> None:

    def fn(_: int, inner: af.World) -> None:
        if world.rank == 1:
            msg = "a bug"
            raise ValueError(msg)
        af.barrier(inner)

    af.find_batch_size(fn, 8, world)


def by_zero(world: af.World, fits: list[int], stage: int) -> list[list[int]]:
    """Return what was tried, of searches that run out of memory in different places."""
    torch.set_num_threads(1)
    importlib.import_module("deepspeed")  # which takes as long as others would wait
    places = ("first", "engine", "forward", "backward", "last")
    return [search_by_zero(world, fits, stage, place) for place in places]


def search_by_zero(
    world: af.World, fits: list[int], stage: int, place: str
) -> list[int]:
    """Return what was tried; DeepSpeed trains as if what was found had been known.

    Of what was tried in vain no memory is held.
    """
    tried: list[int] = []
    memory: list[StorageWeakRef] = []

    def fn(batch_size: int, inner: af.World) -> af.TrainState:
        tried.append(batch_size)
        assert [each for each in memory if not each.expired()] == []
        at = place if batch_size > fits[world.rank] else ""
        return trained_by_zero(batch_size, inner, stage, at, memory)

    state = stepped(af.find_batch_size(fn, 8, world), LOSSES["mean"], 1)
    known = trained_by_zero(tried[-1], world, stage, "", [])
    known = stepped(known, LOSSES["mean"], 1)
    assert differences(tensors(known), tensors(state)) == []
    return tried


def trained_by_zero(
    batch_size: int,
    world: af.World,
    stage: int,
    place: str,
    memory: list[StorageWeakRef],
) -> af.TrainState:
    """Take three updates by DeepSpeed, and run out of memory in the last of them, or elsewhere."""
    if place == "first":
        raise SIGNS[0]
    run = Run(
        32, batch_size, "mean", "adamw", in_list=True, micro=1, dtype=torch.float32
    )
    state = run.state(world, af.wrap_deepspeed(stage))
    if place == "engine":  # in which the other rank waits
        raise SIGNS[0]
    state = stepped(state, LOSSES["mean"], 2)
    flats = engine_of(state).binding.zero.flats
    memory += [StorageWeakRef(each.untyped_storage()) for each in flats]

    def loss_fn(model: Any, batch: Any) -> torch.Tensor:
        x, y, _ = batch
        hidden = model.first(x)
        if place == "forward":
            raise SIGNS[1]
        for block in model.blocks:
            hidden = block(hidden)
        hidden = Full.apply(hidden) if place == "backward" else hidden
        return (model.last(hidden) * model.scale + model.bias - y).square().mean()

    state = stepped(state, loss_fn, 1)
    if place == "last":
        raise SIGNS[0]
    return state


def stepped(state: af.TrainState, loss: Callable[..., Any], updates: int) -> Any:
    batches, step = iter(af.batches(state)), af.make_step(loss)
    for _ in range(updates):
        state, _ = step(state, next(batches))
    return state


def join_slowly(world: af.World) -> tuple[float, float]:
    """Return when this rank had joined a try, which takes rank 0 long, and when it began."""
    join, times = dist.new_group, []

    def new_group(*args: Any, **named: Any) -> Any:
        group = join(*args, **named)
        time.sleep(0.0 if world.rank else 0.2)
        times.append(time.monotonic())
        return group

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "new_group", new_group)
        began = af.find_batch_size(lambda *_: time.monotonic(), 1, world)
    return times[0], began


NO_DEEPSPEED = importlib.util.find_spec("deepspeed") is None


@pytest.mark.ranks(2)
@pytest.mark.parametrize("place", PLACES)
def test_ranks_agree(place):
    """One rank runs out of memory while the other waits: both find what simulated ones do."""
    expected = simulate(2, lambda world: search(world, [16, 5], 16, place))
    for rank, (tried, state) in enumerate(run_ranks(2, search, [16, 5], 16, place)):
        assert tried == [16, 8, 4]
        assert differences(expected[rank][1], state) == []


@pytest.mark.ranks(2)
def test_another_error_is_the_one_that_is_shown():
    """A rank that raises something else ends the other's waiting, and is the culprit."""
    with pytest.raises(RankError, match="ValueError: a bug"):
        run_ranks(2, fail_on_one)


@pytest.mark.ranks(2)
@pytest.mark.skipif(NO_DEEPSPEED, reason="deepspeed is not installed")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ranks_agree_beside_deepspeed(stage):
    """Which talks through torch's default group: wherever one runs out, the other hears of it."""
    for tried in run_ranks(2, by_zero, [16, 5], stage):
        assert tried == [[8, 4]] * 5


@pytest.mark.ranks(2)
def test_a_try_begins_when_all_have_joined_it():
    """A rank that runs out of memory at once would break the joining of one that is slow."""
    times = run_ranks(2, join_slowly)
    assert max(joined for joined, _ in times) <= min(began for _, began in times)
