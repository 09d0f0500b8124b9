# SPDX-License-Identifier: Apache-2.0
"""load(save(s)) is s, bitwise, and a run that is cut and resumed is the uninterrupted one."""

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import accelfn as af
from accelfn.testing import simulate, strategies
from tests.catalog import stacks
from tests.internals import SAVED_FIELDS as FIELDS
from tests.laws.worlds import Found
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


def stranger(run: Run, world: af.World | None = None) -> af.TrainState:
    """Return a state that shares the run's definition, and none of its numbers."""
    other = attrs.evolve(run, seed=run.seed + 1).state(world)
    return attrs.evolve(other, definition=run.state(world).definition)


@given(
    run=runs(), kind=KINDS, setup=chains(), cuts=st.sets(st.integers(0, 4), max_size=2)
)
def test_cut_and_resumed_runs_are_uninterrupted_ones(run, kind, setup, cuts):
    """Saved and loaded at any updates, a run ends bitwise the same; saving changes nothing."""
    run = make(run, kind, setup)
    whole, expected = run.train(run.state(), 4)
    state, done, reported = run.state(), 0, []
    for at in [*sorted(cuts), 4]:
        state, metrics = run.train(state, at - done)
        done = at
        reported += metrics
        before, generator = tensors(state), torch.get_rng_state()
        with tempfile.TemporaryDirectory() as folder:
            af.save(state, Path(folder) / "saved")
            assert torch.equal(generator, torch.get_rng_state())
            loaded = af.load(stranger(run), Path(folder) / "saved")
        assert differences(before, tensors(state)) == []
        assert differences(before, tensors(loaded)) == []
        assert state.seed == loaded.seed
        state = loaded
    assert differences(tensors(whole), tensors(state)) == []
    assert [dict(each) for each in expected] == [dict(each) for each in reported]


def saved_at(world: af.World, run: Run, at: int, directory: str) -> Found:
    """Train to an update, save, and train on; return the last state."""
    state, _ = run.train(run.state(world), at)
    af.save(state, directory)
    return tensors(run.train(state, run.updates - at)[0])


def resumed_at(world: af.World, run: Run, at: int, directory: str) -> Found:
    """Load into a state that knows nothing, and train on; return the last state."""
    state = af.load(stranger(run, world), directory)
    return tensors(run.train(state, run.updates - at)[0])


def cut(sizes, run, at, sums="ring") -> list[tuple[Found, Found]]:
    """Return the last states of a run that was saved, and of it resumed, rank by rank."""
    before, after = sizes
    with tempfile.TemporaryDirectory() as folder:
        to = str(Path(folder) / "saved")
        whole = simulate(before, lambda w: saved_at(w, run, at, to), sums=sums)
        resumed = simulate(after, lambda w: resumed_at(w, run, at, to), sums=sums)
    return list(zip(whole, resumed, strict=False))


@given(
    run=runs(updates=4),
    kind=KINDS,
    setup=st.sampled_from(sorted(SETUPS)),
    at=st.integers(0, 4),
    size=st.sampled_from([1, 2, 3]),
)
def test_ranks_resume_bitwise(run, kind, setup, at, size):
    """Every rank goes on bitwise, in the middle of local SGD's period and of an epoch too."""
    run = make(run, kind, SETUPS[setup])
    if kind == "norm":  # two samples in each of six micro-batches
        run = attrs.evolve(run, n=24, batch_size=12)
    for expected, found in cut((size, size), run, at):
        assert differences(expected, found) == []


@given(
    run=runs(updates=3, n=12),
    at=st.integers(1, 2),
    size=st.sampled_from([3, 4]),
    sums=strategies.sums(),
    bucket=st.sampled_from([None, 1e-5, 1e-4]),
    options=st.sampled_from(
        [
            {},
            {"find_unused_parameters": True},
            {"static_graph": True},
            {"gradient_as_bucket_view": False},
        ]
    ),
)
@example(
    run=Run(n=12, batch_size=1, updates=3, optimizer="adamw"),
    at=1,
    size=3,
    sums="ring",
    bucket=1e-5,
    options={},
)
def test_sums_are_taken_alike_after_a_cut(run, at, size, sums, bucket, options):
    """Where a gradient lies, a backend's order depends on it: in a new process it lies there."""
    ddp = af.wrap_ddp(bucket_cap_mb=bucket, **options)
    run = make(run, "plain", af.chain(af.shard_data(), ddp))
    for expected, found in cut((size, size), run, at, sums):
        assert differences(expected, found) == []


@given(
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.complex64]),
    ones=st.lists(st.integers(1, 3), min_size=2, max_size=4),
    large=st.sampled_from([0.0, 64.0, 256.0]),
)
def test_a_mean_of_narrow_parameters_is_rounded_once(dtype, ones, large):
    """However many ranks had what each addition in 16 bits would lose; complex ones, too."""
    had = torch.tensor([large, *ones]).to(dtype)

    def state_of(world: af.World) -> af.TrainState:
        return af.TrainState.create(
            model=lambda: torch.nn.Linear(1, 1, bias=False, dtype=dtype),
            optimizer=partial(torch.optim.SGD, lr=0.0),
            setup=af.local_sgd(sync_every=9),
            world=world,
        )

    def save(world: af.World) -> None:
        step = af.make_step(lambda model, x: model(x).abs().mean())
        state, _ = step(state_of(world), torch.ones(1, 1, dtype=dtype))
        own = {"weight": had[world.rank].reshape(1, 1)}
        af.save(state.with_params(own), to)

    with tempfile.TemporaryDirectory() as folder:
        to = str(Path(folder) / "saved")
        simulate(len(had), save)
        loaded = af.load(state_of(af.World.single(device="cpu")), to)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    exact = had.to(wide).mean().to(dtype)
    torch.testing.assert_close(loaded.params["weight"], exact.reshape(1, 1))
    if not dtype.is_complex:
        assert loaded.params["weight"].item() == exact.item()


def test_ranks_that_differ_in_what_has_no_mean_are_refused():
    """Entries of the user's own that differ are loaded on as many ranks only."""
    run = Run(n=24, updates=1)

    def save(world: af.World) -> None:
        af.save(run.state(world).with_slot("mine", torch.tensor(world.rank)), to)

    def load(world: af.World) -> int:
        return int(af.load(run.state(world), to).slots["mine"])

    with tempfile.TemporaryDirectory() as folder:
        to = str(Path(folder) / "saved")
        simulate(3, save)
        assert list(simulate(3, load)) == [0, 1, 2]
        with pytest.raises(
            af.errors.CheckpointError, match=r"3 ranks that had different slots\.mine"
        ):
            simulate(2, load)


@pytest.mark.parametrize("size", [1, 3])
def test_optimizer_state_that_one_rank_alone_has_is_refused_elsewhere(size):
    """A parameter that one worker has stepped, and another has not, has no mean of moments."""

    def state_of(world: af.World) -> af.TrainState:
        return af.TrainState.create(
            model=lambda: torch.nn.ModuleList([torch.nn.Linear(1, 1) for _ in "ab"]),
            optimizer=partial(torch.optim.AdamW, lr=0.1),
            setup=af.chain(af.shard_data(), af.local_sgd(sync_every=4)),
            world=world,
        )

    def loss(model: torch.nn.ModuleList, batch: torch.Tensor) -> torch.Tensor:
        return model[0](batch).sum() + (model[1](batch).sum() if batch.sum() else 0)

    def save(world: af.World) -> None:
        state, _ = af.make_step(loss)(
            state_of(world), torch.full((1, 1), float(world.rank))
        )
        af.save(state, to)

    with tempfile.TemporaryDirectory() as folder:
        to = str(Path(folder) / "saved")
        simulate(2, save)
        simulate(2, lambda world: af.load(state_of(world), to))
        with pytest.raises(
            af.errors.CheckpointError, match=r"2 ranks that had different opt_state"
        ):
            simulate(size, lambda world: af.load(state_of(world), to))


@af.transform
class Counting:
    """Counts updates, on any number of ranks, under any name."""

    name: str = "count"

    def init(self, state: af.TrainState) -> torch.Tensor:
        return torch.zeros(())

    def after_update(self, state: af.TrainState, slot: Any, update: Any) -> Any:
        return state, slot + 1

    def merge(self, slots: list[Any], world: af.World) -> tuple[list[float], Any]:
        return [1.0] * len(slots), slots[0]


@given(
    name=st.sampled_from([*FIELDS, "ema", "slots.step", "0"]),
    updates=st.integers(0, 1),
    sizes=st.sampled_from([(1, 1), (1, 2), (2, 1), (2, 3)]),
    bare=st.booleans(),
)
def test_a_transform_may_be_called_as_a_field_is(name, updates, sizes, *, bare):
    """Under any name a slot is saved and loaded, on any ranks, and missed where it was not."""
    bases = [af.shard_data(), af.wrap_ddp()]
    plain, counting = (
        Run(n=24, setup=af.chain(*bases)),
        af.chain(*bases, Counting(name=name)),
    )
    run = attrs.evolve(plain, setup=counting)
    with tempfile.TemporaryDirectory() as folder:
        to = str(Path(folder) / "saved")

        def save(world: af.World) -> Found:
            own = plain if bare else run
            state, _ = own.train(own.state(world), updates)
            af.save(state, to)
            return tensors(state)

        def load(world: af.World) -> Found:
            return tensors(af.load(stranger(run, world), to))

        (saved, *_) = simulate(sizes[0], save)
        if bare:
            with pytest.raises(
                af.errors.CheckpointError, match=f"but not saved: '{name}'"
            ):
                simulate(sizes[1], load)
            return
        for loaded in simulate(sizes[1], load):
            assert differences(saved, loaded) == []
