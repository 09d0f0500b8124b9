# SPDX-License-Identifier: Apache-2.0
"""A batch size is found that fits on all ranks, wherever one of them runs out of memory."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import accelfn as af
from accelfn.testing import simulate
from tests.laws.worlds import DDP
from tests.strategies import Run, tensors

PLACES = ["first", "forward", "backward", "last"]
SIGNS = [MemoryError("no"), torch.OutOfMemoryError("CUDA out of memory")]


class Full(torch.autograd.Function):
    """Runs out of memory in the backward pass, while DDP reduces what is done."""

    @staticmethod
    def forward(_ctx, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx, *_grads: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError


def train(batch_size: int, world: af.World, full: bool, place: str) -> af.TrainState:
    """Take an update of a batch size; a rank that is full runs out of memory somewhere."""
    if full and place == "first":
        raise SIGNS[0]
    state = Run(n=16, batch_size=batch_size, setup=DDP, dyadic=False).state(world)

    def loss_fn(model, batch):
        if full and place == "forward":
            raise SIGNS[1]
        hidden = model.first(batch[0])
        hidden = Full.apply(hidden) if full and place == "backward" else hidden
        return model.head(hidden).square().mean()

    state, _ = af.make_step(loss_fn)(state, next(iter(af.batches(state))))
    if full and place == "last":
        raise SIGNS[0]
    return state


@given(
    fits=st.lists(st.integers(0, 7), min_size=1, max_size=3),
    start=st.integers(1, 7),
    place=st.sampled_from(PLACES),
    schedule=st.lists(st.integers(0, 2), max_size=9),
)
def test_the_largest_that_fits_on_all_ranks_is_found(fits, start, place, schedule):
    """It is the largest start/2^k, and trains as if known; tries in vain leave no connection."""
    tried: list[list[int]] = [[] for _ in fits]

    def search(world: af.World) -> tuple[int, dict[str, torch.Tensor]]:
        given: list[af.World] = []

        def fn(batch_size: int, inner: af.World) -> af.TrainState:
            for each in given if inner is not world else ():
                with pytest.raises(af.errors.WorldError, match="closed"):
                    af.barrier(each)
            given.append(inner)
            tried[world.rank].append(batch_size)
            full = batch_size > fits[world.rank]
            return train(batch_size, inner, full, place)

        state = af.find_batch_size(fn, start, world)
        return tried[world.rank][-1], tensors(state)

    sizes = [start >> k for k in range(start.bit_length())]
    fitting = [size for size in sizes if size <= min(fits)]
    if not fitting:
        with pytest.raises(af.errors.OutOfMemoryError, match="batch size of 1"):
            simulate(len(fits), search, schedule=schedule)
        return
    found = simulate(len(fits), search, schedule=schedule)
    known = simulate(
        len(fits), lambda world: tensors(train(fitting[0], world, full=False, place=""))
    )

    assert tried == [sizes[: sizes.index(fitting[0]) + 1]] * len(fits)
    for (size, state), expected in zip(found, known, strict=True):
        assert size == fitting[0]
        assert all(torch.equal(state[name], expected[name]) for name in expected)
