# SPDX-License-Identifier: Apache-2.0
"""Whatever fails, no rank holds half a step, none waits for ever, and the culprit is named."""

import re
import tempfile
from contextlib import suppress
from pathlib import Path

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import accelfn as af
from accelfn.errors import (
    DeadlockError,
    PeerFailedError,
    RankCrashedError,
    SimulationError,
)
from accelfn.testing import Crash, Fault, Leave, Raise, RankFaultError, Stall, simulate
from tests.laws.worlds import DDP, Found
from tests.strategies import LOSSES, Run, differences, runs, tensors

SETUPS = {
    "ddp": DDP,
    "small buckets": af.chain(
        af.shard_data(),
        af.wrap_ddp(bucket_cap_mb=1e-5, gradient_as_bucket_view=False),
        af.accumulate(num_micro_batches=2),
        af.ema(0.5),
    ),
    "local sgd": af.chain(
        af.shard_data(), af.local_sgd(sync_every=1, buffers=True), af.ema(0.5)
    ),
}
setups = st.sampled_from(sorted(SETUPS))
KINDS = st.sampled_from(["plain", "tied", "norm", "dropout"])
FAULTS = [Raise, Leave, Crash, Stall]


def prepared(run: Run, kind: str, setup: str) -> Run:
    """Return the run with two samples in every micro-batch, and two updates."""
    return attrs.evolve(
        run,
        n=24,
        batch_size=12,
        kind=kind,
        setup=SETUPS[setup],
        updates=2,
        dyadic=False,
    )


@st.composite
def failing(draw: st.DrawFn) -> tuple[Run, int, Fault]:
    """Draw a run, a number of ranks, and a fault in one of its second update's collectives."""
    kind, setup = draw(KINDS), draw(setups)
    run, size = prepared(draw(runs()), kind, setup), draw(st.integers(2, 3))
    first, both = num_collectives(size, run)
    fault = draw(st.sampled_from(FAULTS))
    return (
        run,
        size,
        fault(draw(st.integers(0, size - 1)), draw(st.integers(first, both - 1))),
    )


def num_collectives(size: int, run: Run) -> tuple[int, int]:
    """Return how many collectives a rank calls in one update, and in two."""
    log = simulate(size, lambda world: run.train(run.state(world))).log
    return sum(entry.step in (None, 0) for entry in log), len(log)


@given(drawn=failing())
def test_no_rank_holds_half_a_step(drawn: tuple[Run, int, Fault]) -> None:
    """A failed step leaves the state before, bitwise, or one that refuses to be used."""
    run, size, fault = drawn
    expected = simulate(size, lambda world: tensors(run.train(run.state(world))[0]))
    held: list[str] = []

    def train(world: af.World) -> None:
        state, _ = run.train(run.state(world), 1)
        batch = next(iter(af.batches(state)))
        before = tensors(state)
        try:
            after, _ = af.make_step(LOSSES[run.loss])(state, batch)
        except Exception:
            try:
                still = tensors(state)
            except af.errors.StateDonatedError as error:
                held.append(str(error))
            else:
                assert differences(before, still) == []
                held.append("before")
            raise
        assert differences(expected[world.rank], tensors(after)) == []
        held.append("after")

    with pytest.raises((af.errors.Error, RankFaultError)):
        simulate(size, train, faults=[fault])
    assert len(held) >= size - 1
    for each in held:
        assert each == "before" or "partly updated" in each


@given(drawn=failing())
def test_a_failure_ends_all_and_names_the_culprit(drawn):
    """One rank that raises, leaves, crashes or stalls ends the run, and the error says so."""
    run, size, fault = drawn
    ended: list[type] = []

    def train(world: af.World) -> None:
        try:
            run.train(run.state(world))
        except BaseException as error:
            ended.append(type(error))
            raise

    with pytest.raises((af.errors.Error, RankFaultError)) as caught:
        simulate(size, train, faults=[fault])
    said = "\n".join([str(caught.value), *caught.value.__notes__])
    assert len(ended) == size
    match fault:
        case Raise():
            assert caught.type is RankFaultError
            assert f"In rank {fault.rank} of a simulated world" in said
        case Crash():
            assert caught.type is RankCrashedError
            assert f"Rank {fault.rank} of {size} crashed" in said
        case Leave():
            assert caught.type is DeadlockError
            assert f"rank {fault.rank}: left early" in said
        case Stall():
            assert caught.type is PeerFailedError
            assert f"rank {fault.rank} did not arrive" in said
    if not isinstance(fault, (Raise, Crash)):
        for rank in range(size):  # a row for every rank
            assert re.search(rf"^ *rank {rank}: ", said, re.MULTILINE)


@given(
    run=runs(),
    kind=KINDS,
    setup=setups,
    size=st.integers(1, 3),
    at=st.integers(0, 1),
)
def test_a_step_that_raised_can_be_tried_again(run, kind, setup, size, at):
    """A loss that raises on all ranks, in any micro-batch, leaves no trace in the next step."""
    run = prepared(run, kind, setup)
    expected = simulate(size, lambda world: tensors(run.train(run.state(world))[0]))

    def train(world: af.World) -> Found:
        left = [at]

        def fails(net: torch.nn.Module, batch: object) -> object:
            value = LOSSES[run.loss](net, batch)
            if left[0] == 0:
                raise KeyError("planned")
            left[0] -= 1
            return value

        state, _ = run.train(run.state(world), 1)
        batch, before = next(iter(af.batches(state))), tensors(state)
        once = len(batch.micro_batches) <= at  # then there is no such micro-batch
        if not once:
            with pytest.raises(KeyError, match="planned"):
                af.make_step(fails)(state, batch)
            assert differences(before, tensors(state)) == []
        return tensors(af.make_step(LOSSES[run.loss])(state, batch)[0])

    for one, two in zip(expected, simulate(size, train), strict=True):
        assert differences(one, two) == []


@given(
    kind=st.sampled_from(["plain", "norm"]),
    size=st.integers(2, 3),
    rank=st.integers(0, 2),
    at=st.integers(0, 12),
    fault=st.sampled_from([Raise, Leave, Crash]),
)
def test_a_save_in_which_a_rank_fails_leaves_nothing_or_all(
    kind, size, rank, at, fault
):
    """Whichever collective of a save fails, what has the checkpoint's name is whole."""
    setup = af.chain(af.shard_data(), af.local_sgd(sync_every=2))
    run = Run(n=24, batch_size=12, kind=kind, updates=1, setup=setup, dyadic=False)

    def save(world: af.World, to: Path) -> Found:
        state, _ = run.train(run.state(world))
        found = tensors(state)
        af.save(state, to)
        return found

    with tempfile.TemporaryDirectory() as folder:
        to, whole = Path(folder) / "saved", Path(folder) / "whole"
        log = simulate(size, lambda world: save(world, whole))
        calls = [i for i, each in enumerate(log.log) if "save" in (each.label or "")]
        planned = fault(rank % size, calls[at % len(calls)])
        with pytest.raises((af.errors.Error, RankFaultError)):
            simulate(size, lambda world: save(world, to), faults=[planned])
        if not to.exists():
            simulate(size, lambda world: save(world, to))
        loaded = simulate(size, lambda world: tensors(af.load(run.state(world), to)))
        for one, two in zip(log, loaded, strict=True):
            assert differences(one, two) == []


@given(
    kind=st.sampled_from(FAULTS),
    size=st.integers(1, 3),
    at=st.integers(0, 3),
    taken=st.integers(0, 3),
)
def test_an_update_alone_is_a_place(kind, size, at, taken):
    """A fault happens as its update begins, without a collective; else it is named."""
    setup = af.chain(af.shard_data(), af.local_sgd(sync_every=9))
    run = Run(n=24, batch_size=12, setup=setup, dyadic=False)
    fault, begun = kind(size - 1, step=at), list[int]()

    def fn(world: af.World) -> None:
        state = run.state(world)
        for _ in range(taken):
            if world.rank == size - 1:
                begun.append(state.num_tried)
            state, _ = run.train(state, 1)

    if at < taken:
        with suppress(RankFaultError, RankCrashedError, PeerFailedError, DeadlockError):
            ended = simulate(size, fn, faults=[fault])
            assert ended.missed == ()
            assert kind in (Leave, Stall)
            assert ended.clock == 0.0 or kind is Stall
        assert kind is Stall or begun == list(range(at + 1))
    else:
        with pytest.raises(
            SimulationError, match=re.escape(f"{fault!r} did not happen")
        ):
            simulate(size, fn, faults=[fault])
