# SPDX-License-Identifier: Apache-2.0
"""local_sgd is DDP at one end and plain training at the other, and averages by weight."""

from functools import partial
from itertools import groupby

import attrs
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

import accelfn as af
from accelfn.testing import simulate
from tests.laws.outer_by_hand import NAMES, Moves, moves
from tests.laws.worlds import DDP, Found, alone, params, trained, without_slots
from tests.strategies import Run, differences, runs


@given(run=runs(optimizer="sgd", remainder="short"), size=st.sampled_from([2, 4]))
def test_every_update_is_ddp_for_sgd(run: Run, size: int) -> None:
    """With sync_every=1 and plain SGD, local SGD gives what DDP gives, uneven shares too."""
    ddp = trained(size, run, DDP)
    local = trained(size, run, af.shard_data(), af.local_sgd(sync_every=1))
    for (one, _), (two, _) in zip(ddp, local, strict=True):
        assert differences(params(one[-1]), params(two[-1]), within=1e-9) == []


def test_for_adam_it_differs_from_ddp():
    """For Adam the two are different algorithms, and differ."""
    run = Run(n=8, optimizer="adamw", dyadic=False, loss="squared", updates=2)
    (ddp, _), _ = trained(2, run, DDP)
    (local, _), _ = trained(2, run, af.shard_data(), af.local_sgd(sync_every=1))
    assert "params.head.weight" in differences(ddp[-1], local[-1], within=1e-9)


@given(run=runs(optimizer="adamw", updates=3), every=st.integers(1, 4))
def test_alone_it_is_plain_training(run: Run, every: int) -> None:
    """In a world of 1 local SGD changes nothing, bitwise."""
    expected, _ = alone(run)
    found, _ = alone(run, af.local_sgd(sync_every=every))
    assert differences(expected[-1], without_slots(found[-1])) == []


@given(
    every=st.integers(1, 3),
    updates=st.integers(1, 4),
    size=st.sampled_from([2, 3]),
    buffers=st.booleans(),
    opt_state=st.booleans(),
    optimizer=st.sampled_from(["sgd", "momentum", "adamw"]),
    cap=st.sampled_from([25, 1e-4]),
)
def test_it_communicates_when_it_says(
    every, updates, size, buffers, opt_state, optimizer, cap
):
    """One all-reduce every sync_every updates, and a gather for opt_state; replicas agree after.

    Where a buffer has not room for all, there are as many as it takes.
    """
    setup = af.chain(
        af.shard_data(),
        af.local_sgd(
            sync_every=every, buffers=buffers, opt_state=opt_state, bucket_cap_mb=cap
        ),
    )
    run = Run(n=24, batch_size=12, updates=updates, kind="norm", optimizer=optimizer)
    run = attrs.evolve(run, dyadic=False, loss="squared", setup=setup)
    log = simulate(size, lambda world: run.train(run.state(world))).log
    said = [(e.kind, e.label) for e in log if not e.label.startswith("compare ")]
    once = [each for each, _ in groupby(said)]
    calls = ["all_gather", "all_reduce"] if opt_state else ["all_reduce"]
    times = updates // every if opt_state else min(updates // every, 1)
    assert once == [(kind, "local_sgd") for kind in calls] * times
    sums = [e for e in log if e.label == "local_sgd" and e.kind == "all_reduce"]
    averaging = [each.step for each in sums]
    assert sorted(set(averaging)) == list(range(every - 1, updates, every))
    most = int(cap * 2**20) + 8  # and the weight
    assert all(each.num_bytes <= most for each in sums)
    assert (len(averaging) > len(set(averaging))) == (cap < 1 and updates >= every)
    (first, _), *others = trained(size, run, setup)
    for i in range(updates):
        for second, _ in others:
            apart = {path.split(".")[0] for path in differences(first[i], second[i])}
            apart -= {"slots"}
            if (i + 1) % every:
                assert "params" in apart
            else:
                assert "params" not in apart
                assert ("buffers" in apart) is not buffers
                assert ("opt_state" in apart) is (not opt_state and optimizer != "sgd")


@attrs.define
class Meetings:
    """Ranks that meet neighbours at some periods, once these are there, and all at the last."""

    moves: Moves
    sizes: dict[int, int]
    comes: int
    x: list[Found] = attrs.field(init=False)
    seen: dict[int, list[int]] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        begin = torch.zeros(self.moves.size).double()
        self.x = [dict.fromkeys(NAMES, begin) for _ in range(self.moves.ranks)]
        self.seen = {period: [0] * self.moves.ranks for period in self.sizes}

    def update(self, t: int) -> None:
        for rank, x in enumerate(self.x):
            weight = self.moves.weights[t][rank]
            for n in NAMES if weight else ():
                x[n] = x[n] - self.moves.slope(t, rank, n)
            for each in self.seen.values():
                each[rank] += weight
        there = self.sizes if t >= self.comes else [max(self.sizes)]
        due = [period for period in there if (t + 1) % period == 0]
        if due:
            self.meet(max(due))

    def meet(self, last: int) -> None:
        size = self.sizes[last]
        for begin in range(0, self.moves.ranks, size):
            part = range(begin, begin + size)
            together = self.mean(part, last)
            for rank in part:
                self.x[rank] = dict(together)
        self.seen |= {p: [0] * self.moves.ranks for p in self.seen if p <= last}

    def mean(self, ranks: range, period: int) -> Found:
        weights = [self.seen[period][r] for r in ranks]
        weights = weights if any(weights) else [1] * len(ranks)
        each = [*zip(weights, ranks, strict=True)]
        return {n: sum(w * self.x[r][n] for w, r in each) / sum(weights) for n in NAMES}


STILL = [[0] * 4] * 4


@example(
    moves=Moves(
        [*[STILL] * 6, [[0] * 4, [0, 0, 0, 1], [0] * 4, [0] * 4], STILL],
        [*[[0] * 4] * 5, [1, 0, 0, 0], [0, 1, 0, 0], [0] * 4],
        size=1,
    ),
    every=4,
    near={1: 2, 2: 4},
    comes=0,
)
@given(
    moves=moves(ranks=st.sampled_from([4, 4, 6])),
    every=st.sampled_from([4, 4, 8]),
    near=st.sampled_from([{2: 2}, {1: 2, 2: 4}, {1: 2, 2: 4}, {1: 2}, {2: 4}]),
    comes=st.integers(0, 3),
)
def test_neighbours_meet_more_often(moves, every, near, comes):
    """Parts are averaged at their periods by what their ranks saw since, all at the last; where
    they are put on in mid-run, too.
    """
    near = {period: size for period, size in near.items() if moves.ranks % size == 0}
    alone, setup = (af.local_sgd(sync_every=every, neighbours=n) for n in ({}, near))

    def train(world: af.World) -> list[tuple[Found, Found]]:
        state, found = moves.state(world, alone if comes else setup), []
        for t in range(len(moves.slopes)):
            state = moves.step(state.with_setup(setup) if t == comes else state)
            both = state.params, af.eval_params(state)
            held, view = ({n: p.clone() for n, p in e.items()} for e in both)
            found.append((held, view))
        return found

    by_hand = Meetings(moves, {**near, every: moves.ranks}, comes)
    for t, found in enumerate(zip(*simulate(moves.ranks, train), strict=True)):
        by_hand.update(t)
        everyone = by_hand.mean(range(moves.ranks), every)
        for x, (held, view) in zip(by_hand.x, found, strict=True):
            assert differences(x, held, within=1e-9) == []
            assert differences(everyone, view, within=1e-9) == []


@given(
    run=runs(n=8, batch_size=8, updates=4, kind="norm", dyadic=False),
    size=st.integers(2, 4),
    near=st.sampled_from([1, 2]),
    options=st.fixed_dictionaries(
        {
            "opt_state": st.booleans(),
            "buffers": st.booleans(),
            "bucket_cap_mb": st.sampled_from([25, 1e-5]),
        }
    ),
)
def test_a_part_that_is_all_ranks_meets_as_all_do(run, size, near, options):
    """It is averaged in all that is asked for: parameters, buffers and optimizer state."""
    often = af.local_sgd(sync_every=near, **options)
    setup = af.local_sgd(sync_every=8, neighbours={near: size}, **options)
    expected = trained(size, run, af.shard_data(), often)
    found = trained(size, run, af.shard_data(), setup)
    for (one, _), (two, _) in zip(expected, found, strict=True):
        for before, after in zip(one, two, strict=True):
            assert differences(without_slots(before), without_slots(after)) == []


class Three(nn.Module):
    """Three numbers, each of which may take part in a loss or not."""

    def __init__(self) -> None:
        super().__init__()
        for name in "abc":
            self.register_parameter(name, nn.Parameter(torch.zeros(())))


USED = st.lists(st.sets(st.sampled_from("abc"), min_size=1), min_size=2, max_size=2)


@given(used=st.lists(USED, min_size=2, max_size=3))
def test_momentum_is_averaged_by_name(used: list[list[set[str]]]) -> None:
    """In whatever order gradients come, a has a's momentum; if some rank has none, its own."""
    sgd = partial(torch.optim.SGD, lr=0.0, momentum=0.5)

    def go(world: af.World) -> dict[str, float]:
        setup = af.local_sgd(sync_every=2, opt_state=True)
        state = af.TrainState.create(
            model=Three, optimizer=sgd, setup=setup, world=world
        )
        size = {"a": 1.0, "b": 32.0, "c": 1024.0}
        step = af.make_step(
            lambda model, names: sum(
                getattr(model, name) * size[name] * (1 + world.rank) for name in names
            )
        )
        for names in used[world.rank]:
            state, _ = step(state, sorted(names))
        return {n: float(e["momentum_buffer"]) for n, e in state.opt_state.items()}

    def alone(rank: int, name: str) -> float | None:
        momentum, size = None, {"a": 1.0, "b": 32.0, "c": 1024.0}[name] * (1 + rank)
        for names in used[rank]:
            if name in names:
                momentum = 0.5 * (momentum or 0.0) + size
        return momentum

    for rank, found in enumerate(simulate(len(used), go)):
        for name in "abc":
            held = [alone(each, name) for each in range(len(used))]
            known = [each for each in held if each is not None]
            mean = sum(known) / len(used) if len(known) == len(used) else held[rank]
            assert (found.get(name) is None) == (mean is None)
            assert mean is None or abs(found[name] - mean) < 1e-3
