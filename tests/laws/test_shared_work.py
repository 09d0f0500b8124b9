# SPDX-License-Identifier: Apache-2.0
"""Ranks that each do the work of all are told so once, and no others are."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from hypothesis import example, given
from hypothesis import strategies as st

import accelfn as af
from accelfn.testing import simulate

N = 24
X = torch.linspace(-1, 1, N)[:, None]
REDUCED = {"ddp": af.wrap_ddp(), "local_sgd": af.local_sgd(sync_every=2)}


def loss_fn(model: Any, batch: Any) -> torch.Tensor:
    return model(batch).square().mean()


def create(
    world: af.World, setup: Any, data: af.Data | None, name: str = "state"
) -> af.TrainState:
    return af.TrainState.create(
        model=partial(torch.nn.Linear, 1, 1),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        data=data,
        setup=setup,
        world=world,
        name=name,
    )


def said(size: int, fn: Callable[[af.World], object]) -> list[str]:
    """Return what ranks are warned of."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        simulate(size, fn)
    assert {each.category for each in found} <= {af.errors.AccelfnWarning}
    return [str(each.message) for each in found]


@given(
    size=st.integers(1, 3),
    by=st.sampled_from(list(REDUCED)),
    batch_size=st.integers(2, 8),
    parts=st.integers(1, 2),
    own=st.booleans(),
    sharded=st.booleans(),
    updates=st.integers(1, 3),
)
def test_ranks_that_do_the_same_work_are_told(
    size, by, batch_size, parts, updates, *, own, sharded
):
    """D: without `shard_data` ranks of the same data are told once; with their own they are not."""
    own = own and not sharded

    def rank(world: af.World) -> None:
        rows = X + world.rank if own else X
        setup = af.chain(
            *([af.shard_data()] if sharded else []),
            REDUCED[by],
            af.accumulate(num_micro_batches=parts),
        )
        state = create(world, setup, af.Data(rows, global_batch_size=batch_size))
        step = af.make_step(loss_fn)
        for _, batch in zip(range(updates), af.batches(state), strict=False):
            state, _ = step(state, batch)

    told = said(size, rank)
    if size == 1 or sharded or own:
        assert told == []
    else:
        assert len(told) == 1
        assert f"each of the {size} ranks trains on all samples" in told[0]
        assert "af.chain(af.shard_data()," in told[0]


WAYS = ("batches", "plain", "own plain", "lockstep", "first batches")


@given(
    size=st.integers(1, 3),
    by=st.sampled_from(list(REDUCED)),
    way=st.sampled_from(WAYS),
    has_data=st.booleans(),
)
def test_values_that_are_not_cut_are_told(size, by, way, *, has_data):
    """A4: values that are no batches of the state's data are told once, if ranks share them."""
    has_data = has_data or way in ("batches", "first batches")

    def rank(world: af.World) -> None:
        data = af.Data(X, global_batch_size=6) if has_data else None
        state = create(world, af.chain(af.shard_data(), REDUCED[by]), data)
        step = af.make_step(loss_fn)
        value = X + world.rank if way in ("own plain", "lockstep") else X
        given: list[Any] = [value, value.clone()]
        if way == "lockstep":
            given = list(af.join_uneven(given, world))
        elif way == "batches":
            given = list(af.batches(state, until_epoch=1))
        elif way == "first batches":
            given = [next(iter(af.batches(state))), value, value.clone()]
        for batch in given:
            state, _ = step(state, batch)

    told = said(size, rank)
    if has_data and way in ("plain", "own plain"):
        assert len(told) == 1
        only = told[0]
        assert "a resumed run reads the data again" in only
        assert "step(state, batch, noise)" in only
    elif size > 1 and way == "plain":
        assert len(told) == 1
        only = told[0]
        assert "got the same value on all" in only
        assert "af.batches(state, until_epoch=...)" in only
    else:
        assert told == []


@given(
    size=st.integers(1, 3),
    batch_size=st.integers(1, 9),
    of=st.sampled_from(["its own", "another's", "one before", "a stream of its own"]),
)
@example(size=2, batch_size=2, of="one before")
def test_batches_that_another_state_cut_are_told(
    size: int, batch_size: int, of: str
) -> None:
    """A4: a batch that was not cut for this setup is told; another state's that was is taken."""

    class Stream(torch.utils.data.IterableDataset[Any]):
        def __init__(self, count: int) -> None:
            self.count = count

        def __iter__(self) -> Any:
            return iter(X[: self.count])

    def rank(world: af.World) -> None:
        setup = af.chain(af.shard_data(), af.wrap_ddp())
        data = af.Data(X, global_batch_size=batch_size)
        if of == "a stream of its own":
            data = af.Data(
                Stream(1 + 9 * world.rank), global_batch_size=size, sharded=True
            )
        state = create(world, setup, data)
        source = {
            "another's": lambda: create(world, setup, data, name="other"),
            "one before": lambda: create(world, None, data),
        }.get(of, lambda: state)()
        step = af.make_step(loss_fn)
        for batch in list(af.batches(source, until_epoch=1)):
            state, _ = step(state.with_setup(setup), batch)

    told = said(size, rank)
    if size > 1 and of == "one before" and batch_size > 1:
        assert told
        assert all("This batch is not split" in each for each in told)
    else:
        assert told == []
