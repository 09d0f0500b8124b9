# SPDX-License-Identifier: Apache-2.0
"""Copies of a split model that train apart are as many ranks that have a whole model each."""

from collections import Counter
from typing import Any

import attrs
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import accelfn as af
from accelfn.errors import ReplicaMismatchError
from tests.internals import is_shard, local
from tests.laws.copies_apart import (
    Apart,
    Found,
    apart,
    both_views,
    every,
    gone_on,
    outer,
    trainings,
)
from tests.laws.split_models import Run, wraps
from tests.strategies import differences, tensors


@given(
    run=trainings,
    apart=apart,
    every=every | outer,
    updates=st.integers(1, 4),
    dtype=st.sampled_from([torch.float64, torch.float64, torch.float32]),
    bad=st.none() | st.tuples(st.integers(0, 2), st.integers(0, 2)),
    lone=st.booleans(),
)
def test_a_copy_is_a_rank_alone(run, apart, every, updates, dtype, bad, lone):
    """A copy trains as a rank with a whole model; what is not finite in one skips all."""
    skip = () if bad is None else (af.skip_nonfinite(),)
    run = attrs.evolve(run, dtype=dtype, behind=(*run.behind, *skip))
    whole = Apart(apart.copies, 1)

    def trained(by: Apart, world: af.World) -> Found:
        state = by.state(run, world, every)
        if lone:  # of what is trained no rank has a part
            state = state.with_trainable(lambda name, _: name == "scale")
        state = by.stepped(run, state, updates, bad)
        skipped = bad is not None and bad[0] < updates and bad[1] < by.copies
        assert state.num_skipped == skipped
        return both_views(state)

    alone = list(whole.on_ranks(lambda world: trained(whole, world)))
    split = list(apart.on_ranks(lambda world: trained(apart, world)))
    within = 1e-13 if dtype is torch.float64 else 1e-6
    for rank, found in enumerate(split):
        assert differences(alone[rank // apart.ranks], found, within=within) == []
    averages = isinstance(every, af.local_sgd) and updates % every.sync_every == 0
    if bad is None and averages:  # bit by bit, from copy to copy
        for rank, found in enumerate(split):
            mine, firsts = params(found), params(split[rank % apart.ranks])
            assert differences(firsts, mine) == []


def params(found: Found) -> Found:
    return {name: value for name, value in found.items() if name.startswith("params")}


@given(run=trainings, apart=apart, every=every, updates=st.integers(1, 4))
def test_only_averages_cross_copies(
    run: Run, apart: Apart, every: Any, updates: int
) -> None:
    """Each is a sum of the parts that a rank has, and of a weight, over as many as copies."""
    run = attrs.evolve(run, behind=())
    held: Counter[int] = Counter()

    def trained(world: af.World) -> None:
        state = apart.state(run, world, every)
        trained_names = state.definition.skeleton.once_trained
        if not held[world.rank]:
            parts = [local(p) for n, p in state.params.items() if n in trained_names]
            held[world.rank] = sum(part.numel() for part in parts)
        apart.stepped(run, state, updates)

    log = apart.on_ranks(trained).log
    calls = [each for each in log if each.label == "local_sgd"]
    sums = [each for each in calls if each.kind == "all_reduce"]
    rounds = updates // every.sync_every if apart.copies > 1 else 0
    assert len(sums) == rounds * apart.ranks
    if not every.opt_state:
        assert {each.num_bytes for each in sums} <= {8 * (n + 1) for n in held.values()}
    assert all(each.group == "dp_replicate" for each in calls)
    crossing = {
        each.label for each in log if len({r // apart.ranks for r in each.ranks}) > 1
    }
    assert all(name == "local_sgd" or name.startswith("compare ") for name in crossing)


@example(
    run=Run(1, 1, "weighted", "adamw", in_list=True, micro=1),
    two=(Apart(2, 2, af.wrap_fsdp()), Apart(2, 2, af.wrap_fsdp())),
    every=af.local_sgd(sync_every=3),
    updates=(2, 2),
)
@example(
    run=Run(1, 1, "weighted", "adamw", in_list=True, micro=1),
    two=(Apart(2, 2, af.wrap_fsdp()), Apart(1, 1)),
    every=af.local_sgd(sync_every=3),
    updates=(2, 0),
)
@example(  # as many ranks, and other copies
    run=Run(1, 1, "weighted", "sgd", in_list=True, micro=1),
    two=(Apart(2, 2, af.wrap_fsdp()), Apart(4, 1)),
    every=af.local_sgd(sync_every=3),
    updates=(1, 0),
)
@given(
    run=trainings,
    two=st.tuples(apart | st.just(Apart(2, 1)), apart)
    | st.tuples(apart, st.builds(Apart, st.integers(1, 4), st.just(1))),
    every=every | outer,
    updates=st.tuples(st.integers(0, 3), st.integers(0, 2)),
)
def test_a_period_goes_on_in_any_layout(
    run: Run, two: tuple[Apart, Apart], every: Any, updates: tuple[int, int]
) -> None:
    """What copies held apart is each one's again, or averaged where they lie otherwise."""
    alone, ranks = gone_on(run, two, every, updates)
    for rank, found in enumerate(ranks):
        assert differences(alone[rank // two[1].ranks], found, within=1e-13) == []


@example(
    run=Run(1, 1, "weighted", "sgd", in_list=True, micro=1),
    apart=Apart(2, 2, af.wrap_fsdp()),
    every=af.local_sgd(sync_every=2),
    updates=1,
)
@given(run=trainings, apart=apart, every=every | outer, updates=st.integers(0, 3))
def test_each_rank_has_its_part(run, apart, every, updates):
    """Of parameters and of the average that evaluation sees, as of any split model."""

    def look(world: af.World) -> None:
        state = apart.stepped(run, apart.state(run, world, every), updates)
        for params in (state.params, af.eval_params(state)):
            for param in params.values():
                assert is_shard(param) is bool(param.ndim and apart.ranks > 1)
                if param.ndim:
                    assert len(local(param)) <= -(-len(param) // apart.ranks)

    list(apart.on_ranks(look))


@given(
    run=trainings,
    apart=apart,
    bits=st.sampled_from([16, 8, 4]),
    every=st.integers(1, 2),
    updates=st.integers(1, 3),
)
def test_in_few_bits_copies_have_one_anchor(
    run: Run, apart: Apart, bits: Any, every: int, updates: int
) -> None:
    """The same parts of it, bit by bit; in 16 bits nearly that of numbers as they are."""
    run = attrs.evolve(run, behind=())
    setups = [af.diloco(sync_every=every, bits=each) for each in (bits, 32)]

    def trained(world: af.World) -> list[Found]:
        states = [apart.state(run, world, each) for each in setups]
        states = [apart.stepped(run, state, updates) for state in states]
        return [af.full_params(state, at="eval") for state in states]

    first, *others = apart.on_ranks(trained)
    for other in others:
        assert differences(first[0], other[0]) == []
    if bits == 16 and run.optimizer == "sgd":
        assert differences(first[0], first[1], within=1e-2) == []


@example(  # their parameters agree, and what their optimizers remember does not
    run=Run(1, 1, "weighted", "adagrad", in_list=True, micro=1),
    split=Apart(2, 2, af.wrap_fsdp()),
    every=af.local_sgd(sync_every=2),
    updates=2,
    to="together",
)
@given(
    run=trainings,
    split=st.builds(Apart, st.integers(1, 3), st.just(2), wraps),
    every=every,
    updates=st.integers(0, 4),
    to=st.sampled_from(["together", "cut", "whole"]),
)
def test_copies_change_their_layout_when_they_agree(run, split, every, updates, to):
    """As they are: together from now on, or whole ranks, which stay apart, and back in parts."""
    run = attrs.evolve(run, behind=())
    micro = af.accumulate(num_micro_batches=run.micro)
    parts, whole = ((split.engine, every), (every,))
    before, after = {
        "together": (parts, (split.engine,)),
        "cut": (whole, parts),
        "whole": (parts, whole),
    }[to]

    def moved(world: af.World) -> None:
        state = split.stepped(run, run.fed(world, *before), updates)
        mine = values(state)
        listed = af.all_gather_objects(mine, world)
        setup = af.chain(*after, micro)
        if to != "whole" and any(each != listed[0] for each in listed):
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

    split.on_ranks(moved)


@given(
    run=trainings,
    split=st.builds(Apart, st.integers(2, 3), st.just(2), wraps),
    apart=st.sampled_from([af.identity(), af.local_sgd(sync_every=2)]),
)
def test_copies_are_compared_before_they_train(run, split, apart):
    """What somebody wrote in one of them is found at the next step, by its name."""

    def train(world: af.World) -> None:
        state = run.fed(world, split.engine, apart)
        name = sorted(state.params)[run.seed % len(state.params)]
        copy, _ = split.place(world.rank)
        other = {name: state.params[name] + (copy == 1)}
        state = state.with_params({**state.params, **other})
        with pytest.raises(ReplicaMismatchError, match=f"{name}: checksum"):
            split.stepped(run, state, 1)

    split.on_ranks(train)
