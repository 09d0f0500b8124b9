# SPDX-License-Identifier: Apache-2.0
"""Ranks may run in any order: states, metrics and what they communicate do not depend on it."""

import attrs
from hypothesis import given
from hypothesis import strategies as st

import accelfn as af
from accelfn.testing import simulate
from tests.laws.worlds import DDP
from tests.strategies import LOSSES, differences, runs, tensors

SETUPS = {
    "ddp": DDP,
    "small buckets": af.chain(
        af.shard_data(),
        af.wrap_ddp(bucket_cap_mb=1e-5, find_unused_parameters=True),
        af.accumulate(num_micro_batches=2),
        af.ema(0.5),
    ),
    "local sgd": af.chain(
        af.shard_data(), af.local_sgd(sync_every=2, buffers=True), af.clip_grad_norm(1)
    ),
}
schedules = st.lists(st.integers(0, 3), max_size=60)


@given(
    run=runs(dyadic=False, updates=2),
    kind=st.sampled_from(["plain", "tied", "norm", "dropout"]),
    setup=st.sampled_from(sorted(SETUPS)),
    size=st.integers(2, 4),
    schedule=schedules,
)
def test_any_order_of_ranks_gives_the_same(run, kind, setup, size, schedule):
    """In any order of turns, a run is bitwise the same, and so is the log of collectives."""
    if kind == "norm":  # two samples in each of eight micro-batches
        run = attrs.evolve(run, n=32, batch_size=16)
    run = attrs.evolve(run, kind=kind, setup=SETUPS[setup])

    def everything(world):
        state, metrics = run.train(run.state(world))
        means = [each.all_reduce_mean(world) for each in metrics]
        data = af.Data(run.dataset(), global_batch_size=3)
        means.append(af.evaluate(state, data, LOSSES[run.loss]))
        return tensors(af.finalize(state)), means

    plain = simulate(size, everything)
    other = simulate(size, everything, schedule=schedule)
    for (one, means), (two, same) in zip(plain, other, strict=True):
        assert differences(one, two) == []
        assert means == same
    assert plain.log == other.log
