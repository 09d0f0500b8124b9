# SPDX-License-Identifier: Apache-2.0
"""`af.run` is the loop that one would write, and goes on where it was cut."""

import signal
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

import accelfn as af
from accelfn.testing import simulate
from tests.internals import deliver
from tests.laws.worlds import DDP, single
from tests.strategies import LOSSES, Run, differences, runs, tensors

PERIODS = st.integers(1, 4) | st.integers(1, 2).map(af.epochs)
ENDS = st.integers(1, 9) | st.integers(1, 3).map(af.epochs)
# others may go to infinity
tame = runs().filter(lambda run: run.loss != "squared" and run.kind != "tied")


@af.transform
class Skipping:
    """Has the updates of these numbers, of those that were tried, skipped."""

    numbers: frozenset[int]

    def grads(self, grads, slot, update):
        return grads.with_skip(update.num_tried in self.numbers, agreed=True), slot


def by_hand(
    state: af.TrainState, run: Run, until: Any, periods: list[Any]
) -> tuple[af.TrainState, list[Any]]:
    """Train in a loop; return the state, and what was seen in each period."""
    step, told = af.make_step(LOSSES[run.loss]), []
    seen = {period: af.Metrics({}) for period in periods}
    in_epochs = isinstance(until, af.epochs)
    for batch in af.batches(state, until_epoch=until.count if in_epochs else None):
        before, numbers = state.step, {}
        state, metrics = step(state, batch)
        assert state.cursor == batch.cursor  # skipped or not, it was seen
        for period in periods:
            seen[period] += metrics
            if isinstance(period, af.epochs):
                due = batch.ends_epoch and state.cursor.epoch % period.count == 0
            else:  # a skipped update has no number
                due = state.step % period == 0 and state.step > before
            if due:
                numbers |= named(period, seen[period].all_reduce_mean(state.world))
                seen[period] = af.Metrics({})
        if numbers:
            told.append(([*numbers.items()], state.step))
        if not in_epochs and state.step == until:
            break
    return state, told


def named(period: Any, means: Mapping[str, float]) -> dict[str, float]:
    return {f"{name} in {period}": mean for name, mean in means.items()}


@given(
    run=tame,
    until=ENDS,
    periods=st.lists(PERIODS, min_size=1, max_size=3, unique=True),
    size=st.integers(1, 2),
    skips=st.lists(st.booleans(), max_size=10),
)
def test_it_is_the_loop(
    run: Run, until: Any, periods: list[Any], size: int, skips: list[bool]
) -> None:
    """The state has the same bits, and metrics are seen as often, each update's once."""
    skipped = frozenset(i for i, is_skipped in enumerate(skips) if is_skipped)
    run = attrs.evolve(run, setup=af.chain(DDP, Skipping(skipped)))

    def fn(world: af.World) -> None:
        told: list[Any] = []
        noted: list[int] = []

        def note(state: af.TrainState, _: af.Metrics) -> None:
            noted.append(state.step)

        def mean(state: af.TrainState, metrics: af.Metrics, period: Any) -> Any:
            return named(period, metrics.all_reduce_mean(state.world))

        state = af.run(
            run.state(world),
            af.make_step(LOSSES[run.loss]),
            until=until,
            actions={each: [partial(mean, period=each), note] for each in periods},
            track=lambda numbers, step: told.append(([*numbers.items()], step)),
        )
        expected, seen = by_hand(run.state(world), run, until, periods)
        assert differences(tensors(expected), tensors(state)) == []
        assert seen == told
        assert {*noted} == {step for _, step in seen}

    simulate(size, fn)


@pytest.mark.filterwarnings(
    "ignore::accelfn.errors.AccelfnWarning"
)  # a schedule may be over
@given(
    run=tame,
    until=st.integers(1, 9) | st.integers(2, 3).map(af.epochs),
    cuts=st.lists(st.integers(1, 8), max_size=2, unique=True).map(sorted),
    period=st.integers(1, 4),
)
def test_a_run_that_is_cut_goes_on(
    run: Run, until: Any, cuts: list[int], period: int
) -> None:
    """Ended by SIGTERM at any updates, and begun again with its store: the same bits."""
    step = af.make_step(LOSSES[run.loss])
    whole = af.run(run.state(single()), step, until=until)

    with tempfile.TemporaryDirectory() as folder:
        for cut in [*cuts, None]:

            def end(state: af.TrainState, _: af.Metrics, cut: Any = cut) -> None:
                if state.step == cut:
                    deliver(signal.SIGTERM)

            with af.CheckpointStore(Path(folder), every=period, async_=False) as store:
                go = partial(
                    af.run, step=step, until=until, actions={1: end}, store=store
                )
                if cut is not None and cut <= whole.step:
                    with pytest.raises(SystemExit, match="143"):
                        go(run.state(single()))
                else:
                    state = go(run.state(single()))
                assert store.steps[-1] == min(cut or whole.step, whole.step)
        assert differences(tensors(whole), tensors(state)) == []


@given(run=tame, size=st.integers(2, 3), data=st.data())
def test_ranks_end_together(run: Run, size: int, data: st.DataObject) -> None:
    """A signal to one rank ends all after the same update, whose state is saved whole."""
    culprit, cut = data.draw(st.integers(0, size - 1)), data.draw(st.integers(1, 5))
    run = attrs.evolve(run, setup=DDP)

    def fn(world: af.World, folder: str) -> tuple[Any, int]:
        def end(state: af.TrainState, _: af.Metrics) -> None:
            if state.step == cut and world.rank == culprit:
                deliver(signal.SIGTERM)

        step, code = af.make_step(LOSSES[run.loss]), None
        with af.CheckpointStore(folder, async_=False) as store:
            try:
                af.run(run.state(world), step, until=7, actions={1: end}, store=store)
            except SystemExit as left:
                code = left.code
            return code, store.restore(run.state(world)).step

    with tempfile.TemporaryDirectory() as folder:
        found = simulate(size, lambda world: fn(world, folder)).results
    assert found == ((143, cut),) * size
