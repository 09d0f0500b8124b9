# SPDX-License-Identifier: Apache-2.0
"""Copies of a split model that train apart are as many ranks that have a whole model each."""

import math
import tempfile
from collections import Counter
from functools import partial
from typing import Any

import attrs
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import accelfn as af
from accelfn.base.shards import is_shard, local
from accelfn.errors import ReplicaMismatchError
from accelfn.testing import simulate
from tests.laws.split_models import IN, OUT, Run, runs, weighted_loss, wraps
from tests.strategies import differences, tensors

Found = dict[str, torch.Tensor]
UNSEEN = "buffers.seen"  # each rank's first batch norm sees its own rows


@attrs.frozen
class Apart:
    """Some copies that train apart, of so many ranks each; without an engine, whole models."""

    copies: int
    ranks: int
    engine: Any = None

    @property
    def axes(self) -> dict[str, int] | None:
        """Those of the world."""
        sizes = self.copies, self.ranks
        if getattr(self.engine, "within", None) == "dp_replicate":
            sizes = sizes[::-1]
        split = dict(zip(("dp_replicate", "dp_shard"), sizes, strict=True))
        return None if self.engine is None else split

    @property
    def copy_of_each(self) -> list[int]:
        """The copy of each rank."""
        return [self.place(rank)[0] for rank in range(self.copies * self.ranks)]

    def same(self, other: "Apart") -> bool:
        """Whether each rank is of the same copy."""
        return self.copy_of_each == other.copy_of_each

    def place(self, rank: int) -> tuple[int, int]:
        """Return the copy of a rank, and which of its ranks it is."""
        if getattr(self.engine, "within", None) == "dp_replicate":
            return divmod(rank, self.copies)[::-1]
        return divmod(rank, self.ranks)

    def on_ranks(self, fn: Any) -> Any:
        """Return what a function of a world gives on each rank."""
        return simulate(self.copies * self.ranks, fn, axes=self.axes)

    def state(self, run: Run, world: af.World, every: Any) -> af.TrainState:
        """Return a state whose copies train apart."""
        engine = () if self.engine is None else (self.engine,)
        if isinstance(every, af.diloco):  # it says what is evaluated
            behind = [each for each in run.behind if not isinstance(each, af.ema)]
            run = attrs.evolve(run, behind=tuple(behind))
        return run.fed(world, *engine, every)

    def stepped(
        self,
        run: Run,
        state: af.TrainState,
        updates: int,
        bad: tuple[int, int] | None = None,
    ) -> af.TrainState:
        """Return it after more updates, on a part of the rows of its copy.

        Of an update and a copy that are bad, the first row is not finite.
        """
        step = af.make_step(weighted_loss)
        copy, part = self.place(state.world.rank)
        for _ in range(updates):
            rows = rows_of(run, state.num_tried, copy)
            if bad == (state.num_tried, copy):
                rows[0][0] = math.nan
            places = range(part, self.ranks * run.micro, self.ranks)
            state, _ = step(
                state, [some(rows, at, len(places) * self.ranks) for at in places]
            )
        return state


def rows_of(run: Run, update: int, copy: int) -> tuple[torch.Tensor, ...]:
    """Return 1 to 6 rows that a copy sees in an update; the tokens of one may be none."""
    generator = torch.Generator().manual_seed(run.seed + 10 * update + 100 * copy)
    count = int(torch.randint(1, 7, (), generator=generator))
    x = torch.randn(count, IN, generator=generator, dtype=torch.float64)
    y = torch.randn(count, OUT, generator=generator, dtype=torch.float64)
    tokens = torch.randint(0, 3, (count,), generator=generator)
    return x.to(run.dtype), y.to(run.dtype), tokens.to(run.dtype)


def some(
    rows: tuple[torch.Tensor, ...], at: int, count: int
) -> tuple[torch.Tensor, ...]:
    """Return one of so many parts of rows; where it has none, one row that counts for nothing."""
    x, y, tokens = (each[at::count] for each in rows)
    if len(x):
        return x, y, tokens
    x, y, tokens = (each[:1] for each in rows)
    return x, y, tokens * 0


def both_views(state: af.TrainState) -> Found:
    """Return all of a state, and the average of copies that evaluation sees."""
    found = tensors(state)
    del found[UNSEEN]
    views = af.full_params(state, at="eval").items()
    return {**found, **{f"seen.{name}": value for name, value in views}}


def gone_on(
    run: Run, two: tuple[Apart, Apart], every: Any, updates: tuple[int, int]
) -> tuple[list[Found], list[Found]]:
    """Return what whole models by hand, and what the ranks, have after a load between two.

    By hand, whole models are averaged by as many ranks as there had not been.
    """
    first, second = two
    between = [] if first.same(second) else [Apart(first.copies + 1, 1)]
    by_hand = [Apart(first.copies, 1), *between, Apart(second.copies, 1)]

    def run_by(*through: Apart) -> list[Found]:
        found: list[Found] = []
        counts = [updates[0], *[0] * (len(through) - 2), updates[1]]
        with tempfile.TemporaryDirectory() as folder:

            def go_on(at: int, world: af.World) -> Found:
                state = through[at].state(run, world, every)
                if at:
                    state = af.load(state, f"{folder}/{at - 1}")
                state = through[at].stepped(run, state, counts[at])
                af.save(state, f"{folder}/{at}")
                return both_views(state)

            for at, apart in enumerate(through):
                found = list(apart.on_ranks(partial(go_on, at)))
        return found

    return run_by(*by_hand), run_by(first, second)


every = st.builds(
    af.local_sgd,
    sync_every=st.integers(1, 3),
    opt_state=st.booleans(),
)
outer = st.builds(
    af.diloco,
    sync_every=st.just(3),
    fragments=st.sampled_from([1, 1, 2]),
    delay=st.integers(0, 2),
    mix=st.sampled_from([0.0, 0.5]),
    bucket_cap_mb=st.sampled_from([25, 1e-4]),
) | st.builds(af.diloco, sync_every=st.integers(1, 2))
shapes = st.sampled_from([(2, 2), (2, 2), (3, 2), (2, 3), (1, 3), (2, 4)])
apart = st.builds(lambda shape, wrap: Apart(*shape, wrap), shapes, wraps)
trainings = st.integers(1, 3).flatmap(
    lambda micro: runs(n=1, batch_size=1, loss="weighted", micro=micro)
)


@given(
    run=trainings,
    apart=apart,
    every=every | outer,
    updates=st.integers(1, 4),
    dtype=st.sampled_from([torch.float64, torch.float64, torch.float32]),
    bad=st.none() | st.tuples(st.integers(0, 2), st.integers(0, 2)),
    lone=st.booleans(),
)
def test_a_copy_is_a_rank_alone(
    run: Run,
    apart: Apart,
    every: Any,
    updates: int,
    dtype: torch.dtype,
    bad: tuple[int, int] | None,
    lone: bool,
) -> None:
    """Parameters, optimizer state, averages and what is evaluated are those of whole models.

    What is not finite in one copy skips that update in all.
    """
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


@given(run=trainings, apart=apart, updates=st.integers(1, 3))
def test_an_average_an_update_is_one_model_of_sgd(
    run: Run, apart: Apart, updates: int
) -> None:
    """With sync_every=1 and plain SGD, copies that train apart are copies that do not."""
    run = attrs.evolve(run, optimizer="sgd", behind=())
    setups = af.local_sgd(sync_every=1), af.identity()

    def trained(world: af.World) -> list[Found]:
        states = [apart.state(run, world, each) for each in setups]
        return [params(tensors(apart.stepped(run, s, updates))) for s in states]

    for averaged, summed in apart.on_ranks(trained):
        assert differences(averaged, summed, within=1e-12) == []


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


@given(run=trainings, apart=apart, every=every | outer, updates=st.integers(0, 3))
def test_each_rank_has_its_part(
    run: Run, apart: Apart, every: Any, updates: int
) -> None:
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


@given(
    run=trainings,
    split=st.builds(Apart, st.integers(1, 3), st.just(2), wraps),
    every=every,
    updates=st.integers(0, 4),
    to=st.sampled_from(["together", "cut", "whole"]),
)
def test_copies_change_their_layout_when_they_agree(
    run: Run, split: Apart, every: Any, updates: int, to: str
) -> None:
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
        listed = af.gather_objects(mine, world)
        setup = af.chain(*after, micro)
        if to != "whole" and any(each != listed[0] for each in listed):
            with pytest.raises(ReplicaMismatchError, match="trained apart"):
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
def test_copies_are_compared_before_they_train(
    run: Run, split: Apart, apart: Any
) -> None:
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
