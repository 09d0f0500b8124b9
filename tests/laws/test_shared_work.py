# SPDX-License-Identifier: Apache-2.0
"""Ranks that each do the work of all, and loops that would do nothing, are told so once."""

import tempfile
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice
from typing import Any

import torch
from hypothesis import example, given
from hypothesis import strategies as st

import accelfn as af
from accelfn.testing import simulate
from tests.laws.worlds import DDP
from tests.states import linear_state

N = 24
X = torch.linspace(-1, 1, N)[:, None]
REDUCED = {"ddp": af.wrap_ddp(), "local_sgd": af.local_sgd(sync_every=2)}


step = af.make_step(lambda model, batch: model(batch).square().mean())


def said(fn: Callable[[], object]) -> list[str]:
    """Return what a function is warned of; it is the same on any number of ranks."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        fn()
    assert {each.category for each in found} <= {af.errors.AccelfnWarning}
    return [str(each.message) for each in found]


def trained(state: af.TrainState, batches: Iterable[Any]) -> af.TrainState:
    """Return the state after these batches."""
    for batch in batches:
        state, _ = step(state, batch)
    return state


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
        data = af.Data(rows, global_batch_size=batch_size)
        state = linear_state(data=data, setup=setup, world=world)
        trained(state, islice(af.batches(state), updates))

    told = said(lambda: simulate(size, rank))
    if size == 1 or sharded or own:
        assert told == []
    else:
        assert len(told) == 1
        assert f"each of the {size} ranks trains on all samples" in told[0]
        assert "af.chain(af.shard_data()," in told[0]


class Rows(torch.utils.data.IterableDataset[Any]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Any:
        return iter(X[: self.count])


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
        setup = af.chain(af.shard_data(), REDUCED[by])
        state = linear_state(data=data, setup=setup, world=world)
        value = X + world.rank if way in ("own plain", "lockstep") else X
        given: list[Any] = [value, value.clone()]
        if way == "lockstep":
            given = list(af.join_uneven(given, world))
        elif way == "batches":
            given = list(af.batches(state, until_epoch=1))
        elif way == "first batches":
            given = [next(iter(af.batches(state))), value, value.clone()]
        trained(state, given)

    told = said(lambda: simulate(size, rank))
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

    def rank(world: af.World) -> None:
        setup = af.chain(af.shard_data(), af.wrap_ddp())
        data = af.Data(X, global_batch_size=batch_size)
        if of == "a stream of its own":
            stream = Rows(1 + 9 * world.rank)
            data = af.Data(stream, global_batch_size=size, sharded=True)
        create = partial(linear_state, data=data, world=world)
        state = create(setup=setup)
        source = {
            "another's": lambda: create(setup=setup, name="other"),
            "one before": create,
        }.get(of, lambda: state)()
        for batch in list(af.batches(source, until_epoch=1)):
            state, _ = step(state.with_setup(setup), batch)

    told = said(lambda: simulate(size, rank))
    if size > 1 and of == "one before" and batch_size > 1:
        assert told
        assert all("This batch is not split" in each for each in told)
    else:
        assert told == []


# Loops that do nothing.


def create(n: int, batch_size: int, world: af.World | None = None) -> af.TrainState:
    data = af.Data(torch.linspace(-1, 1, n)[:, None], global_batch_size=batch_size)
    return linear_state(data=data, setup=DDP, world=world)


THEN: dict[str, Callable[[af.TrainState], af.TrainState]] = {
    "copied": lambda state: state.copy(),
    "nothing": lambda state: state,
    "an entry": lambda state: state.with_slot("mine", 1),
    "averaged": lambda state: state.with_setup(af.chain(DDP, af.ema(0.5))),
}
"""What may be done to a state that trains nothing."""
sizes = st.tuples(st.integers(1, 9), st.integers(1, 4))


@given(
    sizes=sizes,
    updates=st.none() | st.integers(0, 12),
    epochs=st.integers(1, 4),
    loaded=st.booleans(),
    then=st.sampled_from([*THEN]),
    ranks=st.integers(1, 2),
)
def test_a_loop_that_does_nothing_says_so(
    sizes, updates, epochs, then, ranks, *, loaded
):
    """A9: it is told where the state stands; a loaded run that is just complete is let be."""
    per_epoch = -(-sizes[0] // sizes[1])
    if updates is None:  # just all
        updates = epochs * per_epoch
    behind, within = divmod(updates, per_epoch)

    def rank(world: af.World, folder: str) -> int:
        state = create(*sizes, world)
        state = trained(state, islice(af.batches(state), updates))
        if loaded:
            af.save(state, folder)
            state = af.load(create(*sizes, world), folder)
        return len(list(af.batches(THEN[then](state), until_epoch=epochs)))

    with tempfile.TemporaryDirectory() as folder:
        found: list[int] = []
        told = said(
            lambda: found.extend(simulate(ranks, lambda w: rank(w, f"{folder}/saved")))
        )
    assert found == [max(0, epochs * per_epoch - updates)] * ranks
    complete = (behind, within) == (epochs, 0)
    if found[0] or (loaded and complete):
        assert told == []
    else:
        assert len(told) == 1
        (text,) = told
        assert f"af.batches(state, until_epoch={epochs}) yields no batch" in text
        assert f"finished {behind} epochs ({updates} updates)" in text
        assert f"pass until_epoch={behind + 1}" in text


@given(sizes=sizes, epochs=st.integers(1, 3))
def test_loops_of_epochs_are_told_apart(sizes: tuple[int, int], epochs: int) -> None:
    """A9: `epochs=1` in a loop of epochs trains one, and says so; `epochs=epoch + 1` all."""

    def loop(count: Callable[[int], int]) -> int:
        state = create(*sizes)
        for epoch in range(epochs):
            state = trained(state, af.batches(state, until_epoch=count(epoch)))
        return state.cursor.epoch

    reached: list[int] = []
    assert len(said(lambda: reached.append(loop(lambda _: 1)))) == epochs - 1
    assert said(lambda: reached.append(loop(lambda epoch: epoch + 1))) == []
    assert reached == [1, epochs]


@given(sizes=sizes, epochs=st.integers(1, 3))
def test_a_run_that_is_over_is_let_be(sizes: tuple[int, int], epochs: int) -> None:
    """A9: `af.run(until=)` says its end by itself, so what is over is no surprise."""
    state = create(*sizes)
    ends: list[int] = []

    def run() -> None:
        nonlocal state
        state = af.run(state, step, until=af.epochs(epochs))
        ends.append(state.step)

    assert said(run) == []
    assert said(run) == []
    assert ends[0] == ends[1] == epochs * -(-sizes[0] // sizes[1])
