# SPDX-License-Identifier: Apache-2.0
"""Workers of several ranks whose gradients are compressed: each is a world of its own."""

import math
import tempfile
from typing import Any

import torch
from hypothesis import example, given
from hypothesis import strategies as st

import accelfn as af
from tests.laws.copies_apart import Apart, rows_of, some
from tests.laws.split_models import Run, runs, weighted_loss
from tests.strategies import differences, tensors

Found = dict[str, torch.Tensor]
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
workers = st.builds(
    lambda shape, ddp: Apart(*shape, ddp),
    st.sampled_from([(2, 2), (2, 2), (3, 2), (2, 3)]),
    st.builds(
        af.wrap_ddp,
        within=st.sampled_from(sorted(ACROSS)),
        bucket_cap_mb=st.sampled_from([None, 1e-4]),
        gradient_as_bucket_view=st.booleans(),
    ),
)
trainings = st.integers(1, 2).flatmap(
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
    run=trainings,
    apart=workers,
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
