# SPDX-License-Identifier: Apache-2.0
"""Losses with several denominators, which are counted before the first forward pass."""

import math
from functools import partial
from typing import Any

import attrs
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import accelfn as af
from accelfn.testing import simulate
from tests.laws.worlds import DDP, close_means, params, single
from tests.states import linear_state
from tests.strategies import Run, differences, runs, tensors


def count(batch: Any) -> dict[str, Any]:
    """Count two things, of which there may be none."""
    x, y = batch
    return {"big": int((x[:, 0].abs() > 1).sum()), "size": y[:, 1].abs().sum()}


def both(net: nn.Module, batch: Any, counts: dict[str, float]) -> af.Loss:
    """Return a loss of two means over different things."""
    x, y = batch
    out = net(x) * y
    big = (out.sum(1) * (x[:, 0].abs() > 1)).sum()
    size = (out[:, 0] * y[:, 1].abs()).sum()
    share = big / counts["big"] + size / counts["size"]
    return af.Loss(share, 1, seen=(float(len(x)), 1), size=size / counts["size"])


double = partial(nn.Linear, 2, 2, dtype=torch.float64)


def count_on(world: af.World) -> Any:
    """Return what counts, in an order of each rank's own."""
    return lambda batch: dict(sorted(count(batch).items(), reverse=world.rank % 2 == 1))


def trained(world: af.World, run: Run) -> Any:
    state, step = run.state(world), af.make_step(both, count=count_on(world))
    means = []
    for batch, _ in zip(af.batches(state), range(run.updates), strict=False):
        state, metrics = step(state, batch)
        means.append(metrics.all_reduce_mean(world))
    return params(tensors(state)), means


@given(
    run=runs(dyadic=False, remainder="short", optimizer="sgd"),
    micro=st.integers(1, 4),
    size=st.integers(1, 4),
    fp16=st.booleans(),
)
def test_several_denominators_are_those_of_the_whole_update(
    run: Run, micro: int, size: int, fp16: bool
) -> None:
    """Two means over different things train alike for any ranks and micro-batches."""
    scaled = af.autocast("fp16") if fp16 else None
    setup = af.chain(DDP, af.accumulate(num_micro_batches=micro), scaled)
    want, means = trained(single(), attrs.evolve(run, setup=af.chain()))
    for got, found in simulate(
        size, lambda world: trained(world, attrs.evolve(run, setup=setup))
    ).results:
        assert differences(want, got, within=1e-9) == []
        for one, two in zip(means, found, strict=True):
            same = {"loss", "size"}
            assert close_means({n: one[n] for n in same}, {n: two[n] for n in same})


@given(
    cuts=st.lists(st.integers(1, 3), max_size=3),
    rows=st.integers(1, 2),
    is_batch=st.booleans(),
)
def test_parts_of_parts_are_counted(cuts: list[int], rows: int, is_batch: bool) -> None:
    """Of several that accumulate, each cuts what the one before has cut of a plain value."""
    x = (torch.arange(2.0 * rows * math.prod(cuts), dtype=torch.float64) * 3).sin()
    whole = (2 * x.view(-1, 2), x.view(-1, 2).cos())

    def cut(value: Any, among: list[int]) -> Any:
        if not among:
            return value
        first, *others = among
        return [cut(part, others) for part in af.micro_batches(value, first)]

    def count_of_part(part: Any) -> dict[str, Any]:
        # it is what the loss is given
        assert [torch.Tensor] * 2 == [*map(type, part)]
        return count(part)

    def trained(setup: Any, value: Any) -> dict[str, torch.Tensor]:
        data = af.Data([*zip(*whole, strict=True)], global_batch_size=len(whole[0]))
        state = linear_state(model=double, data=data, setup=setup)
        given = next(iter(af.batches(state))) if is_batch else value
        step = af.make_step(both, count=count_of_part)
        return dict(step(state, given)[0].params)

    ways = [
        af.accumulate(num_micro_batches=n, name=f"into_{i}") for i, n in enumerate(cuts)
    ]
    want, got = trained(None, whole), trained(af.chain(*ways), cut(whole, cuts))
    assert differences(want, got, within=1e-9) == []


@given(sizes=st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=3), max_size=3))
def test_what_each_rank_reads_for_itself_is_counted(sizes: list[list[int]]) -> None:
    """Over `af.join_uneven` an update's counts are those of the ranks that still have a batch."""
    sizes = sizes or [[2]]

    def rows(rank: int, turn: int) -> Any:
        x = torch.arange(1.0, 2 * sizes[rank][turn] + 1, dtype=torch.float64)
        x = (x * (rank + 2) + turn).sin().reshape(-1, 2) * 2
        return x, x.cos()

    def of_turn(turn: int) -> Any:
        having = [rows(r, turn) for r, own in enumerate(sizes) if turn < len(own)]
        return tuple(map(torch.cat, zip(*having, strict=True)))

    def trained(world: af.World, batches: Any) -> dict[str, torch.Tensor]:
        state = linear_state(model=double, setup=af.wrap_ddp(), world=world)
        step = af.make_step(both, count=count)
        for batch in batches:
            state, _ = step(state, batch)
        return dict(state.params)

    want = trained(single(), map(of_turn, range(max(map(len, sizes)))))

    def on_rank(world: af.World) -> dict[str, torch.Tensor]:
        own = (rows(world.rank, turn) for turn in range(len(sizes[world.rank])))
        return trained(world, af.join_uneven(own, world, ends="last"))

    for got in simulate(len(sizes), on_rank).results:
        assert differences(want, got, within=1e-9) == []


@given(names=st.lists(st.sampled_from(["a", "b", "c"]), min_size=2, max_size=3))
def test_counts_of_other_names_are_told(names: list[str]) -> None:
    """Ranks that count as much under other names do not get one another's numbers."""

    def fn(world: af.World) -> str:
        world.connection.simulated = None  # as in a world of real processes
        state = linear_state(setup=af.wrap_ddp(), world=world)
        step = af.make_step(
            lambda net, x, counts: net(x).sum() / counts[names[world.rank]],
            count=lambda x: {names[world.rank]: len(x)},
        )
        try:
            step(state, torch.ones(2, 1))
        except af.errors.CollectiveMismatchError as error:
            return str(error)
        return ""

    for told in simulate(len(names), fn):
        rows = [f'\n  rank {rank}: ["{name}"]' for rank, name in enumerate(names)]
        assert bool(told) == (len(set(names)) > 1)
        assert not told or all(row in told for row in rows)
