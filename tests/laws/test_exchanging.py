# SPDX-License-Identifier: Apache-2.0
"""Transforms put on, taken off and exchanged in mid-run, and engines made anew there."""

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

import accelfn as af
from accelfn.errors import ReplicaMismatchError
from accelfn.testing import simulate
from tests.catalog import CATALOG
from tests.laws.worlds import DDP, single
from tests.strategies import Run, differences, tensors

LR = 0.5
Rows = Callable[[int, int], torch.Tensor]


def rows_of(seed: int) -> Rows:
    """Return the rows that a rank sees in an update: one to three, of each rank others."""

    def rows(update: int, rank: int) -> torch.Tensor:
        count = 1 + (update * 5 + rank * 4 + seed) % 3
        return torch.arange(count).double() + (update * 7 + seed) % 5 + 16 * rank

    return rows


def create(world: af.World, *setup: object, momentum: float = 0.0) -> af.TrainState:
    """Return the state of one number."""
    return af.TrainState.create(
        model=lambda: nn.ParameterList([torch.zeros((), dtype=torch.float64)]),
        optimizer=functools.partial(torch.optim.SGD, lr=LR, momentum=momentum),
        setup=af.chain(*setup),
        world=world,
    )


STEP = af.make_step(lambda net, x: (net[0] * x).mean())


def trained(
    state: af.TrainState, rows: Rows, updates: int, *, anew: bool = False
) -> af.TrainState:
    """Return the state after some updates, perhaps with an engine for each."""
    for _ in range(updates):
        state, _ = STEP(state, rows(state.step, state.world.rank))
        if anew:
            af.release_engine(state)
    return state


def number(state: af.TrainState) -> float:
    return float(state.params["0"])


@attrs.frozen
class Plan:
    """Some updates of all ranks together, then apart, averaged by a period, and a cut."""

    sizes: tuple[int, int]
    together: int
    every: int
    apart: int
    rest: int
    seed: int
    anew: bool

    def by_hand(self) -> list[list[float]]:
        """Return each rank's number, after each part of the run."""
        rows, at, ranks = rows_of(self.seed), 0, self.sizes[0]
        held, seen, since, found = [0.0] * ranks, [0] * ranks, self.together, []
        for part, updates in enumerate((self.together, self.apart, self.rest)):
            if part == 2 and self.sizes[1] != ranks:
                ranks = self.sizes[1]
                held, seen = [_mean(held, seen)] * ranks, [0] * ranks
            for _ in range(updates):
                mine = [rows(at, rank) for rank in range(ranks)]
                slopes = [float(each.mean()) for each in mine]
                counts = [len(each) for each in mine]
                if part == 0:
                    slopes = [_mean(slopes, counts)] * ranks
                held = [p - LR * g for p, g in zip(held, slopes, strict=True)]
                seen = [n + c for n, c in zip(seen, counts, strict=True)]
                at += 1
                if part and at - since == self.every:
                    held = [_mean(held, seen)] * ranks
                    seen, since = [0] * ranks, at
            seen = seen if part else [0] * ranks
            found.append(held)
        return found


def _mean(values: list[float], weights: list[int]) -> float:
    if not any(weights):
        return sum(values) / len(values)
    return sum(v * w for v, w in zip(values, weights, strict=True)) / sum(weights)


plans = st.builds(
    Plan,
    st.sampled_from([(2, 2), (2, 1), (1, 2), (1, 3), (3, 2)]),
    st.sampled_from([0, 1, 5]),
    st.integers(2, 4),
    st.integers(0, 5),
    st.integers(0, 4),
    st.integers(0, 9),
    st.booleans(),
)


@given(plan=plans)
@example(plan=Plan((2, 2), 0, 2, 1, 0, 0, False))  # noqa: FBT003 - as `plans` builds it
def test_a_period_begins_where_it_was_put_on(plan: Plan) -> None:
    """From then on, through cuts, other numbers of ranks and new engines, ranks are averaged."""
    rows, local = rows_of(plan.seed), af.local_sgd(sync_every=plan.every)

    with tempfile.TemporaryDirectory() as folder:
        to = Path(folder) / "saved"

        def first(world: af.World) -> list[float]:
            state = trained(create(world, DDP), rows, plan.together)
            found = [number(state)]
            state = trained(state.with_setup(local), rows, plan.apart, anew=plan.anew)
            af.save(state, to)
            return [*found, number(state)]

        def rest(world: af.World) -> float:
            state = af.load(create(world, local), to)
            return number(trained(state, rows, plan.rest, anew=plan.anew))

        parts = list(zip(*simulate(plan.sizes[0], first), strict=True))
        parts.append(tuple(simulate(plan.sizes[1], rest)))
    for one, two in zip(plan.by_hand(), parts, strict=True):
        assert all(abs(a - b) <= 1e-9 for a, b in zip(one, two, strict=True))


@given(
    updates=st.tuples(st.integers(0, 2), st.integers(0, 4)),
    local=st.builds(
        af.local_sgd, sync_every=st.integers(1, 3), opt_state=st.booleans()
    ),
    momentum=st.sampled_from([0.0, 0.5]),
    beside=st.sampled_from([af.identity(), af.ema(0.5)]),
    ended=st.booleans(),
)
@example(  # only the optimizers differ
    updates=(0, 2),
    local=af.local_sgd(sync_every=2),
    momentum=0.5,
    beside=af.identity(),
    ended=False,
)
def test_ranks_go_together_again_when_they_agree(
    updates, local, momentum, beside, ended
):
    """Those that hold other numbers are refused, be it in an average or in the optimizer."""
    rows, (together, apart) = rows_of(0), updates

    def train(world: af.World) -> list[float]:
        state = create(world, DDP, beside, momentum=momentum)
        state = trained(state, rows, together)
        state = trained(state.with_setup(af.chain(local, beside)), rows, apart)
        state = af.finalize(state) if ended else state
        held = tensors(state)
        mine = {n: float(t) for n, t in held.items() if "local_sgd" not in n}
        ranks = af.all_gather_objects(mine, world)
        if ranks[0] != ranks[1]:
            with pytest.raises(ReplicaMismatchError, match="trained independently"):
                state.with_setup(af.chain(DDP, beside))
            return []
        state = trained(state.with_setup(af.chain(DDP, beside)), rows, 2)
        return [number(state), float(af.full_params(state, at="eval")["0"])]

    found = simulate(2, train).results
    assert found[0] == found[1]
    agree = ended or apart % local.sync_every == 0
    has_own = beside.name == "ema" or (momentum and not local.opt_state)
    assert not found[0] if not agree else found[0] or has_own


@given(size=st.integers(2, 3), apart=st.integers(0, 3), seed=st.integers(0, 9))
def test_what_is_averaged_stays(size: int, apart: int, seed: int) -> None:
    """Behind an average finalize moves no bit and asks no rank; nor does a second finalize."""
    rows, local = rows_of(seed), af.local_sgd(sync_every=2)

    def train(world: af.World) -> None:
        state = trained(create(world, local), rows, apart)
        if apart % 2:
            state = af.finalize(state)
        before = number(state)
        assert number(af.finalize(state)) == before

    log = simulate(size, train).log
    averages = [each for each in log if each.label == "local_sgd"]
    assert len(averages) == (apart + 1) // 2


@given(
    start=st.integers(0, 3),
    every=st.integers(1, 4),
    updates=st.integers(0, 6),
    anew=st.booleans(),
)
def test_replicas_are_checked_at_multiples(start, every, updates, anew):
    """Wherever it is put on, it looks behind each update whose number is a multiple."""

    def train(world: af.World) -> None:
        state = trained(create(world, DDP), rows_of(0), start)
        state = state.with_setup(af.chain(DDP, af.check_replicas(every=every)))
        trained(state, rows_of(0), updates, anew=anew)

    log = simulate(2, train).log
    told = {each.label for each in log if each.label.startswith("check_replicas")}
    wanted = range(start + 1, start + updates + 1)
    assert told == {f"check_replicas at update {n}" for n in wanted if n % every == 0}


@given(
    parts=st.lists(st.tuples(st.booleans(), st.integers(0, 3)), max_size=4),
    decay=st.sampled_from([0.5, 0.75]),
    cut=st.booleans(),
    anew=st.booleans(),
)
def test_an_average_begins_where_it_was_put_on(parts, decay, cut, anew):
    """Each time it is put on it begins at the parameters of then, and knows of nothing before."""
    state, rows = create(single(), momentum=0.5), rows_of(1)
    average: float | None = None
    for on, updates in parts:
        state = state.with_setup(af.ema(decay) if on else None)
        average = (number(state) if average is None else average) if on else None
        for _ in range(updates):
            state = trained(state, rows, 1, anew=anew)
            if average is not None:
                average = decay * average + (1 - decay) * number(state)
        if cut:
            with tempfile.TemporaryDirectory() as folder:
                af.save(state, Path(folder) / "saved")
                fresh = create(single(), state.setup, momentum=0.5)
                state = af.load(fresh, Path(folder) / "saved")
        expected = number(state) if average is None else average
        assert abs(float(af.eval_params(state)["0"]) - expected) <= 1e-9
        assert ("ema" in state.slots) == on


NEUTRAL = [entry.neutral for entry in CATALOG if entry.neutral is not None]
some = st.lists(st.sampled_from(NEUTRAL), max_size=3, unique_by=lambda each: each.name)


@given(
    setups=st.lists(some, min_size=2, max_size=4),
    size=st.sampled_from([1, 1, 2]),
    kind=st.sampled_from(["plain", "norm", "dropout"]),
    optimizer=st.sampled_from(["momentum", "adamw"]),
)
def test_what_is_neutral_comes_and_goes(setups, size, kind, optimizer):
    """Put on, taken off or exchanged behind any update, it changes no bit of the rest."""
    run = Run(n=24, batch_size=12, kind=kind, optimizer=optimizer, dyadic=False)
    run = attrs.evolve(run, loss="squared", schedule=True, setup=DDP)

    def train(world: af.World, *, plain: bool) -> dict[str, torch.Tensor]:
        state = run.state(world)
        for setup in setups:
            state = state if plain else state.with_setup(af.chain(DDP, *setup))
            state, _ = run.train(state, 1)
        return tensors(state.with_setup(DDP))

    expected, found = (
        simulate(size, functools.partial(train, plain=plain)) for plain in (True, False)
    )
    for one, two in zip(expected, found, strict=True):
        assert differences(one, two) == []
