# SPDX-License-Identifier: Apache-2.0
"""A loop over `af.batches` that would do nothing says so, and no other loop says anything."""

import tempfile
import warnings
from collections.abc import Callable, Iterable
from functools import partial

import torch
from hypothesis import given
from hypothesis import strategies as st

import accelfn as af
from accelfn.testing import simulate

SETUP = af.chain(af.shard_data(), af.wrap_ddp())
step = af.make_step(lambda model, batch: model(batch).square().mean())


def create(n: int, batch_size: int, world: af.World | None = None) -> af.TrainState:
    return af.TrainState.create(
        model=partial(torch.nn.Linear, 1, 1),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        data=af.Data(torch.linspace(-1, 1, n)[:, None], global_batch_size=batch_size),
        setup=SETUP,
        world=world,
    )


def trained(state: af.TrainState, batches: Iterable[af.Batch]) -> af.TrainState:
    """Return the state after these batches."""
    for batch in batches:
        state, _ = step(state, batch)
    return state


def said(fn: Callable[[], object]) -> list[str]:
    """Return what a function is warned of; it is the same on any number of ranks."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        fn()
    assert {each.category for each in found} <= {af.errors.AccelfnWarning}
    return [str(each.message) for each in found]


THEN: dict[str, Callable[[af.TrainState], af.TrainState]] = {
    "copied": lambda state: state.copy(),
    "nothing": lambda state: state,
    "an entry": lambda state: state.with_slot("mine", 1),
    "averaged": lambda state: state.with_setup(af.chain(SETUP, af.ema(0.5))),
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
        for _, batch in zip(range(updates), af.batches(state), strict=False):
            state, _ = step(state, batch)
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
