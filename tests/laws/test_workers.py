# SPDX-License-Identifier: Apache-2.0
"""Workers of several ranks each, under `wrap_ddp(within=)`, are as many ranks alone."""

import math
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import attrs
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import accelfn as af
from accelfn.errors import ReplicaMismatchError
from accelfn.testing import simulate
from tests.internals import is_shard, read_manifest
from tests.laws.copies_apart import (
    Apart,
    Found,
    both_views,
    every,
    gone_on,
    outer,
    rows_of,
    some,
    trainings,
)
from tests.laws.split_models import Run, runs, weighted_loss, wraps
from tests.strategies import differences, tensors

ddps = st.builds(
    af.wrap_ddp,
    within=st.sampled_from(["dp_shard", "dp_shard", "dp_replicate"]),
    bucket_cap_mb=st.sampled_from([None, 1e-4]),
    find_unused_parameters=st.booleans(),
    gradient_as_bucket_view=st.booleans(),
)
SHAPES = [*[(2, 2)] * 4, (3, 2), (2, 3), (1, 3), (3, 1), (2, 4), (4, 2)]


def _apart(shape: tuple[int, int], engine: Any) -> Apart:
    return Apart(*shape, engine)


workers = st.builds(_apart, st.sampled_from(SHAPES), ddps)


def shared(found: Found) -> Found:
    """Return what ranks of a worker have alike: all but the weight that they have seen."""
    return {n: t for n, t in found.items() if not n.startswith("buffers")}


@example(
    run=Run(1, 1, "weighted", "adamw", in_list=True, micro=2),
    apart=Apart(2, 1, af.wrap_ddp(within="dp_shard")),
    every=af.local_sgd(sync_every=2),
    updates=3,
    dtype=torch.float64,
    bad=None,
)
@given(
    run=trainings,
    apart=workers,
    every=every | outer,
    updates=st.integers(1, 4),
    dtype=st.sampled_from([torch.float64, torch.float64, torch.float32]),
    bad=st.none() | st.tuples(st.integers(0, 2), st.integers(0, 2)),
)
def test_a_worker_is_a_rank_alone(
    run: Run,
    apart: Apart,
    every: Any,
    updates: int,
    dtype: torch.dtype,
    bad: tuple[int, int] | None,
) -> None:
    """Parameters, optimizer state, averages and what is evaluated, of the union of its shares.

    Bit by bit the ranks of a worker have the same. What is not finite in one worker skips that
    update in all.
    """
    skip = () if bad is None else (af.skip_nonfinite(),)
    run = attrs.evolve(run, dtype=dtype, behind=(*run.behind, *skip))
    whole = Apart(apart.copies, 1)

    def trained(by: Apart, world: af.World) -> Found:
        state = by.stepped(run, by.state(run, world, every), updates, bad)
        skipped = bad is not None and bad[0] < updates and bad[1] < by.copies
        assert state.num_skipped == skipped
        return both_views(state)

    alone = list(whole.on_ranks(lambda world: trained(whole, world)))
    found = list(apart.on_ranks(lambda world: trained(apart, world)))
    within = 1e-13 if dtype is torch.float64 else 1e-6
    firsts: dict[int, Found] = {}
    for rank, mine in enumerate(found):
        copy, _ = apart.place(rank)
        assert differences(alone[copy], mine, within=within) == []
        assert differences(shared(firsts.setdefault(copy, mine)), shared(mine)) == []


@given(run=trainings, apart=workers, every=every, updates=st.integers(1, 4))
def test_only_averages_cross_workers(
    run: Run, apart: Apart, every: Any, updates: int
) -> None:
    """Gradients, compressed ones too, stay among the ranks of one."""
    run = attrs.evolve(run, behind=(af.compress_grads("bf16"),) if run.seed % 2 else ())

    def trained(world: af.World) -> None:
        apart.stepped(run, apart.state(run, world, every), updates)

    log = apart.on_ranks(trained).log
    rounds = updates // every.sync_every if apart.copies > 1 else 0
    sums = [e for e in log if (e.label, e.kind) == ("local_sgd", "all_reduce")]
    assert len(sums) == rounds * apart.ranks
    crossing = {e.label for e in log if len({apart.place(r)[0] for r in e.ranks}) > 1}
    assert all(name == "local_sgd" or name.startswith("compare ") for name in crossing)
    backward = [e for e in log if e.label == "DistributedDataParallel backward"]
    assert bool(backward) is (apart.ranks > 1)
    assert all(len(e.ranks) == apart.ranks for e in backward)


split = st.builds(_apart, st.sampled_from([(2, 2), (3, 2), (2, 3)]), wraps)
whole = st.builds(Apart, st.sampled_from([1, 2, 4, 6]), st.just(1))


@example(
    run=Run(1, 1, "weighted", "adamw", in_list=True, micro=1),
    two=(Apart(4, 1), Apart(2, 2, af.wrap_ddp(within="dp_shard"))),
    every=af.local_sgd(sync_every=3),
    updates=(2, 2),
)
@example(  # along the other axis
    run=Run(1, 1, "weighted", "sgd", in_list=True, micro=1),
    two=(
        Apart(2, 2, af.wrap_ddp(within="dp_replicate")),
        Apart(2, 2, af.wrap_ddp(within="dp_shard")),
    ),
    every=af.local_sgd(sync_every=3),
    updates=(1, 0),
)
@example(  # along the same
    run=Run(1, 1, "weighted", "adamw", in_list=True, micro=1),
    two=(Apart(2, 2, af.wrap_ddp(within="dp_shard")),) * 2,
    every=af.local_sgd(sync_every=3),
    updates=(1, 2),
)
@given(
    run=trainings,
    two=st.tuples(workers, workers | split | whole) | st.tuples(split | whole, workers),
    every=every,
    updates=st.tuples(st.integers(0, 3), st.integers(0, 2)),
)
def test_a_period_goes_on_with_other_workers(
    run: Run, two: tuple[Apart, Apart], every: Any, updates: tuple[int, int]
) -> None:
    """Of as many workers each goes on with what it had, split or not; others with the average.

    By hand, ranks alone are averaged by as many ranks as there had not been.
    """
    alone, ranks = gone_on(run, two, every, updates)
    for rank, found in enumerate(ranks):
        copy, _ = two[1].place(rank)
        assert differences(alone[copy], found, within=1e-13) == []


@example(  # their parameters agree, and what their optimizers remember does not
    run=Run(1, 1, "weighted", "adagrad", in_list=True, micro=1),
    apart=Apart(2, 2, af.wrap_ddp(within="dp_shard")),
    every=af.local_sgd(sync_every=2),
    updates=2,
    to="workers",
)
@given(
    run=trainings,
    apart=st.builds(
        _apart,
        st.sampled_from([(2, 2), (3, 2), (2, 3)]),
        st.just(af.wrap_ddp(within="dp_shard")),
    ),
    every=every,
    updates=st.integers(0, 4),
    to=st.sampled_from(["together", "workers", "ranks", "parts"]),
)
def test_workers_form_when_ranks_agree(run, apart, every, updates, to):
    """And part at any time: into ranks alone, or into parts of a model that is split."""
    run = attrs.evolve(run, behind=())
    micro = af.accumulate(num_micro_batches=run.micro)
    ranks, parts = (every,), (af.wrap_fsdp(), every)
    before, after = {
        "together": ((apart.engine, every), (af.wrap_ddp(),)),
        "workers": (ranks, (apart.engine, every)),
        "ranks": ((apart.engine, every), ranks),
        "parts": ((apart.engine, every), parts),
    }[to]

    def moved(world: af.World) -> None:
        state = run.fed(world, *before)
        step = af.make_step(weighted_loss)
        for update in range(updates):
            copy, part = apart.place(world.rank)
            rows = _rows(run, update, copy if len(before) > 1 else world.rank)
            batch = some(rows, part, apart.ranks) if len(before) > 1 else rows
            state, _ = step(state, [batch] * run.micro)
        mine = values(state)
        listed = af.all_gather_objects(mine, world)
        setup = af.chain(*after, micro)
        if to in ("together", "workers") and any(each != listed[0] for each in listed):
            with pytest.raises(ReplicaMismatchError, match="trained independently"):
                state.with_setup(setup)
        else:
            assert values(state.with_setup(setup)) == mine

    def values(state: af.TrainState) -> dict[str, list[float]]:
        found = tensors(state).items()
        return {
            name: tensor.flatten().tolist()
            for name, tensor in found
            if not name.startswith(("slots.local_sgd", "buffers"))
        }

    apart.on_ranks(moved)


def _rows(run: Run, update: int, seen_by: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(run.seed + 10 * update + 100 * seen_by)
    x = torch.randn(4, 3, generator=generator, dtype=torch.float64)
    y = torch.randn(4, 2, generator=generator, dtype=torch.float64)
    return x, y, torch.ones(4, dtype=torch.float64)


@given(run=trainings, apart=workers, updates=st.integers(0, 2))
def test_ranks_of_a_worker_are_compared(run: Run, apart: Apart, updates: int) -> None:
    """What somebody wrote in one of them is found at the next step, by its name."""
    run = attrs.evolve(run, behind=())
    every = af.local_sgd(sync_every=9)

    def train(world: af.World) -> None:
        state = apart.stepped(run, apart.state(run, world, every), updates)
        name = sorted(state.params)[run.seed % len(state.params)]
        _, place = apart.place(world.rank)
        other = {name: state.params[name] + (place == apart.ranks - 1)}
        state = state.with_params({**state.params, **other})
        af.release_engine(state)
        if apart.ranks == 1:
            apart.stepped(run, state, 1)
            return
        with pytest.raises(ReplicaMismatchError, match=f"{name}: checksum"):
            apart.stepped(run, state, 1)

    apart.on_ranks(train)


@af.transform
class Counting:
    """Ranks train apart for good, and count what they have seen."""

    gives_up: ClassVar = {"replicas_agree": "for good"}
    reduce: ClassVar = None

    def init(self, state: af.TrainState) -> Any:
        del state
        return {"weight": 1.0}

    def grads(self, grads: Any, slot: Any, update: Any) -> Any:
        del update
        return grads, {"weight": slot["weight"] + float(grads.weight)}

    def merge(self, slots: Any, world: af.World) -> Any:
        weights = [slot["weight"] for slot in slots]
        return weights, {"weight": sum(weights)}


@given(
    run=trainings,
    apart=workers | split,
    updates=st.integers(0, 3),
    size=st.sampled_from([1, 5]),
)
def test_a_worker_is_saved_and_merged_once(
    run: Run, apart: Apart, updates: int, size: int
) -> None:
    """Not once a rank: its tensors lie in one file, and a merge gets one slot of it."""
    run = attrs.evolve(run, behind=())
    with tempfile.TemporaryDirectory() as folder:

        def write(world: af.World) -> tuple[float, list[str]]:
            state = apart.state(run, world, Counting())
            state = apart.stepped(run, state, updates)
            af.save(state, f"{folder}/saved")
            wholes = [n for n, p in state.params.items() if not is_shard(p)]
            return state.slots["counting"]["weight"], wholes

        def read(world: af.World) -> float:
            state = run.fed(world, Counting())
            loaded = af.load(state, f"{folder}/saved")
            assert loaded.step == updates
            return loaded.slots["counting"]["weight"]

        saved = list(apart.on_ranks(write))
        seen = {apart.place(rank)[0]: weight for rank, (weight, _) in enumerate(saved)}
        assert set(simulate(size, read)) == {sum(seen.values())}
        files = read_manifest(Path(folder, "saved")).files.values()
        held = Counter(name for file in files for name in file.tensors)
        assert max(held[f"params.{name}"] for name in saved[0][1]) <= apart.copies


# Gradients that are compressed.

ACROSS = {"dp_shard": "dp_replicate", "dp_replicate": "dp_shard"}
OTHERS = ("num_skipped", "slots.skip_nonfinite", "slots.local_sgd", "slots.ema")

powersgd = st.builds(
    af.compress_grads,
    st.just("powersgd"),
    matrix_approximation_rank=st.integers(1, 3),
    start_powerSGD_iter=st.integers(0, 2),
    min_compression_rate=st.just(0),
)
methods = (
    powersgd
    | powersgd
    | st.builds(af.compress_grads, st.sampled_from(["bf16", "fp16"]))
)
compressing = st.builds(
    _apart,
    st.sampled_from([(2, 2), (2, 2), (3, 2), (2, 3)]),
    st.builds(
        af.wrap_ddp,
        within=st.sampled_from(sorted(ACROSS)),
        bucket_cap_mb=st.sampled_from([None, 1e-4]),
        gradient_as_bucket_view=st.booleans(),
    ),
)
of_rows = st.integers(1, 2).flatmap(
    lambda micro: runs(n=1, batch_size=1, loss="weighted", micro=micro)
)


def shared_out(run: Run, apart: Apart, update: int, rank: int, *, bad: bool) -> Any:
    """Return a rank's micro-batches of the rows that its worker sees in an update."""
    copy, part = apart.place(rank)
    rows = rows_of(run, update, copy)
    if bad:
        rows[0][0] = math.nan
    places = range(part, apart.ranks * run.micro, apart.ranks)
    return [some(rows, at, len(places) * apart.ranks) for at in places]


def looked_at(state: af.TrainState) -> Found:
    """Return all of a state but what counts skips, or has seen that workers meet."""
    found = tensors(state).items()
    return {n: t.clone() for n, t in found if not n.startswith(OTHERS)}


@given(
    run=of_rows,
    apart=compressing,
    method=methods,
    every=st.integers(1, 3),
    updates=st.integers(1, 4),
    cut=st.integers(0, 4),
    bad=st.none() | st.tuples(st.integers(0, 2), st.integers(0, 1)),
)
@example(
    run=Run(1, 1, "weighted", "adagrad", in_list=False, micro=1),
    apart=Apart(2, 2, af.wrap_ddp(within="dp_replicate")),
    method=af.compress_grads(
        "powersgd",
        matrix_approximation_rank=1,
        start_powerSGD_iter=0,
        min_compression_rate=0,
    ),
    every=1,
    updates=2,
    cut=0,
    bad=(1, 0),
)
def test_a_worker_compresses_as_a_world_of_its_own(
    run, apart, method, every, updates, cut, bad
):
    """Bit by bit, with what PowerSGD leaves out on each rank, over averages, skips and cuts."""
    local = af.local_sgd(sync_every=every)
    behind = () if bad is None else (af.skip_nonfinite(),)
    axis = apart.engine.within

    def train(world: af.World, folder: str) -> list[tuple[Found, Found]]:
        def fresh() -> af.TrainState:
            return run.fed(world, apart.engine, local, method, *behind)

        alone_ddp = af.wrap_ddp(
            bucket_cap_mb=apart.engine.bucket_cap_mb,
            gradient_as_bucket_view=apart.engine.gradient_as_bucket_view,
        )
        one = run.fed(world.along(axis), alone_ddp, method, *behind)
        state, step, found = fresh(), af.make_step(weighted_loss), []
        for update in range(updates):
            if update == cut:
                af.save(state, folder)
                af.release_engine(state)
                state = af.load(fresh(), folder)
            copy, _ = apart.place(world.rank)
            is_bad = bad is not None and bad[0] == update
            batch = shared_out(
                run, apart, update, world.rank, bad=is_bad and bad == (update, copy)
            )
            state, _ = step(state, batch)
            if not is_bad:
                one, _ = step(one, batch)
            if state.step % every == 0 and not is_bad:
                one = one.with_params(state.params)
            found.append((looked_at(one), looked_at(state)))
        return found

    with tempfile.TemporaryDirectory() as folder:
        ranks = apart.on_ranks(lambda world: train(world, f"{folder}/saved"))
    for moments in ranks:
        for alone, worker in moments:
            assert differences(alone, worker) == []
