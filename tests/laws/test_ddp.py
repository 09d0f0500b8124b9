# SPDX-License-Identifier: Apache-2.0
"""wrap_ddp reduces once an update, whatever the buckets, and refuses ranks that differ."""

import functools
from typing import Any
from unittest import mock

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import accelfn as af
from accelfn.errors import ReplicaMismatchError
from accelfn.testing import simulate
from tests.laws.worlds import DDP
from tests.processes import run_ranks
from tests.ranks import programs
from tests.states import STEP, create, linear_state
from tests.strategies import LOSSES, Run, differences, runs, tensors


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.register_buffer("passes", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        return self.layer(x)


@given(
    size=st.integers(2, 4),
    parts=st.integers(2, 4),
    updates=st.integers(1, 3),
    engine=st.sampled_from([af.wrap_ddp(), af.wrap_fsdp()]),
)
def test_buffers_cross_once_an_update(size, parts, updates, engine):
    """Its first micro-batch begins with those of rank 0, and the others go on from them."""

    def communicated(number):
        def fn(world):
            setup = af.chain(engine, af.accumulate(num_micro_batches=number))
            state = create(model=Counting, setup=setup, world=world)
            for _ in range(updates):
                state, _ = STEP(state, [torch.ones(1, 2)] * number)

        log = simulate(size, fn).log
        return [(e.step, e.label, e.num_bytes) for e in log if e.kind == "broadcast"]

    assert communicated(1) == communicated(parts) != []


@given(
    kind=st.sampled_from(["plain", "tied", "norm"]),
    size=st.sampled_from([2, 3]),
    where=st.integers(0, 100),
    bit=st.integers(0, 63),
    setup=st.sampled_from([af.wrap_ddp(), af.local_sgd(sync_every=2)]),
)
def test_ranks_that_differ_in_a_bit_are_refused(kind, size, where, bit, setup):
    """One bit of one element of one rank is enough, and its tensor is named."""
    run = Run(kind=kind, setup=af.chain(setup), dyadic=False)
    names = list(run.state().params)
    name = names[where % len(names)]

    def build(world):
        state = run.state(world)
        if world.rank == size - 1:
            bits = state.params[name].view(-1)[where % 2 :][:1].view(torch.int64)
            bits ^= 1 << bit if bit < 63 else -(1 << 63)
        af.prepare_engine(state)

    with pytest.raises(
        ReplicaMismatchError, match=rf"(?s)values.*rank 0: {name}: checksum"
    ):
        simulate(size, build)


@given(size=st.sampled_from([2, 3]), rank=st.integers(0, 2))
def test_ranks_that_differ_in_shape_are_refused(size, rank):
    """The first tensor of another shape is named, with each rank's."""

    def build(world):
        wide = 2 + (world.rank == rank % size)
        af.prepare_engine(linear_state(2, wide, setup=af.wrap_ddp(), world=world))

    with pytest.raises(ReplicaMismatchError, match=r"(?s)structure.*weight.*\(3, 2"):
        simulate(size, build)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("bucket_cap_mb", 1.5),
        ("gradient_as_bucket_view", False),
        ("find_unused_parameters", True),
        ("forward_sync_buffers", False),
    ],
)
def test_options_reach_ddp(option, value):
    """Every option of wrap_ddp reaches DistributedDataParallel, and changes it alone."""
    from tests.internals import ddp_engine as module  # the one place that builds it

    def given_to_ddp(setup):
        with mock.patch.object(module, "LeanDDP", wraps=module.LeanDDP) as spy:
            simulate(2, lambda world: af.prepare_engine(Run(setup=setup).state(world)))
        seen = dict(spy.call_args.kwargs)
        del seen["process_group"]
        return seen

    default = given_to_ddp(af.wrap_ddp())
    assert default[option] != value
    assert given_to_ddp(af.wrap_ddp(**{option: value})) == {**default, option: value}


def test_a_static_graph_is_that_of_the_first_pass_that_reduces():
    """DistributedDataParallel is told so before that pass, and not before one that does not."""
    run = Run(setup=af.chain(af.shard_data(), af.wrap_ddp(static_graph=True)))

    def told(world):
        state, loss = run.state(world), run.program().loss
        compute, seen = af.value_and_grad(loss), list[bool]()
        for sync in (False, False, True, False, True):
            batch = next(iter(af.batches(state)))
            compute(state, batch, sync=sync)
            runner: Any = state.definition.cache.engine._runner
            seen.append(runner._ddp.static_graph)
        return seen

    assert simulate(2, told).results == ([False, False, True, True, True],) * 2


@pytest.mark.ranks(2)
def test_a_profiler_sees_ddp_and_changes_nothing():
    """DDP's own record is left out only while no profiler looks, in real processes."""
    run = Run(setup=DDP)
    for seen, plain, watched in run_ranks(2, programs.under_a_profiler, run):
        assert "DistributedDataParallel.forward" in seen
        assert differences(plain, watched) == []


@pytest.mark.parametrize("optimizer", ["AdamW", "Adam", "SGD", "Adagrad"])
@given(seed=st.integers(0, 100), batch_size=st.integers(1, 12))
def test_fused_optimizers_divide_alike(optimizer, seed, batch_size):
    """Where torch's fused kernel divides by the weight, the update is the divided one's."""
    data = torch.randn(12, 3, generator=torch.Generator().manual_seed(seed))
    kind = getattr(torch.optim, optimizer)

    def train(world, *, fused):
        optimizer = functools.partial(kind, lr=0.1, fused=fused)
        rows = af.Data(data, global_batch_size=batch_size)
        options = {"optimizer": optimizer, "data": rows, "setup": DDP}
        state = linear_state(3, 2, **options, world=world)
        for batch in af.batches(state, until_epoch=1):
            state, _ = STEP(state, batch)
        return dict(state.params)

    def both(world):
        fused, plain = (train(world, fused=each) for each in (True, False))
        torch.testing.assert_close(fused, plain, rtol=1e-5, atol=1e-6)

    simulate(2, both)


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
