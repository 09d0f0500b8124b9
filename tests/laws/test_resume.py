# SPDX-License-Identifier: Apache-2.0
"""load(save(s)) is s, bitwise, and a run that is cut and resumed is the uninterrupted one."""

import tempfile
from pathlib import Path

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import accelfn as af
from tests.catalog import stacks
from tests.processes import run_ranks
from tests.ranks import programs
from tests.strategies import Run, differences, runs, tensors

KINDS = st.sampled_from(["plain", "tied", "frozen", "norm", "dropout", "unused"])
SPLIT = [af.shard_data(), af.accumulate(num_micro_batches=2)]
SETUPS = {
    "ddp": af.chain(*SPLIT, af.wrap_ddp(find_unused_parameters=True), af.ema(0.5)),
    "local sgd": af.chain(*SPLIT, af.local_sgd(sync_every=2), af.clip_grad_norm(0.5)),
}


def chains() -> st.SearchStrategy[object]:
    return stacks(3).map(lambda found: af.chain(*found))


def make(run: Run, kind: str, setup: object) -> Run:
    # batch norm needs two samples in every micro-batch
    n = 16 if kind == "norm" else max(run.n, 12)
    return attrs.evolve(run, kind=kind, setup=setup, n=n, batch_size=8, dyadic=False)


@given(
    run=runs(), kind=KINDS, setup=chains(), cuts=st.sets(st.integers(0, 4), max_size=2)
)
def test_cut_and_resumed_runs_are_uninterrupted_ones(
    run: Run, kind: str, setup: object, cuts: set[int]
) -> None:
    """Saved and loaded at any updates, several times, a run ends bitwise the same."""
    run = make(run, kind, setup)
    whole, _ = run.train(run.state(), 4)
    state, done = run.state(), 0
    for cut in sorted(cuts):
        state, _ = run.train(state, cut - done)
        done = cut
        with tempfile.TemporaryDirectory() as folder:
            af.save(state, Path(folder) / "saved")
            loaded = af.load(run.state(), Path(folder) / "saved")
        assert differences(tensors(state), tensors(loaded)) == []
        state = loaded
    state, _ = run.train(state, 4 - done)
    assert differences(tensors(whole), tensors(state)) == []


@settings(max_examples=10)
@given(
    run=runs(),
    kind=KINDS,
    setup=st.sampled_from(sorted(SETUPS)),
    at=st.integers(0, 3),
    size=st.sampled_from([1, 2]),
)
@pytest.mark.ranks(2)
def test_ranks_resume_bitwise(
    run: Run, kind: str, setup: str, at: int, size: int
) -> None:
    """Every rank goes on bitwise, in the middle of local SGD's period and of an epoch too."""
    run = attrs.evolve(make(run, kind, SETUPS[setup]), updates=4)
    with tempfile.TemporaryDirectory() as folder:
        saved = str(Path(folder) / "saved")
        whole = run_ranks(size, programs.save, run, saved, at)
        resumed = run_ranks(size, programs.resume, run, saved, at)
    for expected, found in zip(whole, resumed, strict=True):
        assert differences(expected, found) == []


@settings(max_examples=8)
@given(
    run=runs(optimizer="momentum"),
    kind=st.sampled_from(["plain", "tied", "norm"]),
    at=st.integers(0, 3),
    sizes=st.sampled_from([(2, 1), (1, 2), (2, 4), (4, 2)]),
)
@pytest.mark.ranks(4)
def test_another_number_of_ranks_goes_on(
    run: Run, kind: str, at: int, sizes: tuple[int, int]
) -> None:
    """Saved on n ranks and loaded on m, a run ends where it would have, up to rounding."""
    setup = af.chain(af.shard_data(), af.wrap_ddp())
    run = attrs.evolve(make(run, kind, setup), updates=4)
    with tempfile.TemporaryDirectory() as folder:
        saved = str(Path(folder) / "saved")
        whole = run_ranks(sizes[0], programs.save, run, saved, at)
        resumed = run_ranks(sizes[1], programs.resume, run, saved, at)
    if kind == "norm":  # its statistics are of a rank's share: only that it goes on
        assert whole[0]["step"] == resumed[0]["step"]
        return
    assert differences(whole[0], resumed[0], within=1e-9) == []


@pytest.mark.ranks(2)
def test_ranks_that_differ_are_not_mixed() -> None:
    """Between averages of local SGD a checkpoint is refused elsewhere; after one it is not."""
    run = Run(n=16, dyadic=False, loss="squared", updates=3)
    run = attrs.evolve(run, setup=af.chain(af.shard_data(), af.local_sgd(sync_every=2)))
    with tempfile.TemporaryDirectory() as folder:
        between, after = str(Path(folder) / "between"), str(Path(folder) / "after")
        run_ranks(2, programs.save, run, between, 1)
        run_ranks(2, programs.save, run, after, 2)
        with pytest.raises(af.CheckpointError, match="2 ranks whose params.*differed"):
            af.load(run.state(), between)
        assert af.load(run.state(), after).step == 2
