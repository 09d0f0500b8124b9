# SPDX-License-Identifier: Apache-2.0
"""diloco is what its papers say, whatever crosses when, and in however many bits."""

import tempfile
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

import accelfn as af
from accelfn.testing import simulate
from tests.internals import num_bytes, part_size
from tests.laws.outer_by_hand import (
    NAMES,
    OUTER,
    PLAIN,
    ByHand,
    Moves,
    Values,
    close,
    moves,
    options,
)
from tests.states import linear_state

BITS = st.sampled_from([32, 16, 8, 4])


def by_hand(moves: Moves, chosen: Any, outer: Any) -> ByHand:
    hand = {name: value for name, value in chosen.items() if name != "bucket_cap_mb"}
    return ByHand(moves, **hand, **outer)


@given(moves=moves(), chosen=options(), outer=OUTER)
@example(  # fragments of which no whole number comes in as many updates
    moves=Moves(
        [[[0, 0, 0, each]] for each in (0, 0, 1, 0, 0)],
        [[each] for each in (0, 0, 1, 0, 0)],
        1,
    ),
    chosen={"sync_every": 6, "fragments": 4, "delay": 0, "mix": 0.0},
    outer={"lr": 0.5, "momentum": 0.0},
)
@example(  # what was sent comes back an update later
    moves=Moves([[[4, 4, -3, -6], [5, 4, -8, 0]]] * 2, [[3, 3], [2, 1]], 2),
    chosen={"sync_every": 2, "fragments": 2, "delay": 1, "mix": 0.5},
    outer={"lr": 0.5, "momentum": 0.0},
)
def test_it_is_what_the_papers_say(moves, chosen, outer):
    """After each update, and in the end, ranks hold what a few lines of arithmetic give."""
    sgd = partial(torch.optim.SGD, nesterov=outer["momentum"] > 0, **outer)

    def train(world: af.World) -> list[tuple[Values, ...]]:
        state, found = moves.state(world, af.diloco(outer=sgd, **chosen)), []
        for _ in moves.slopes:
            state = moves.step(state)
            both = state.params, af.eval_params(state)
            found.append(tuple({n: p.clone() for n, p in v.items()} for v in both))
        return [*found, (af.finalize(state).params,) * 2]

    expected = by_hand(moves, chosen, outer)
    for t, found in enumerate(zip(*simulate(moves.ranks, train), strict=True)):
        if t < len(moves.slopes):
            expected.update()
        else:
            expected.finish()
        for rank, (held, evaluated) in enumerate(found):
            assert close(held, expected.x[rank])
            assert close(evaluated, expected.anchor)


@given(
    moves=moves(),
    first=options(),
    then=options(),
    bits=st.tuples(BITS, BITS),
    outer=OUTER,
    cut=st.integers(0, 8),
)
@example(
    moves=Moves([[[0] * 4]] * 6 + [[[0, 0, 0, 1]]] + [[[0] * 4]], [[1]] * 8, size=1),
    first={"sync_every": 1, "fragments": 1, "delay": 0, "mix": 0.0},
    then={"sync_every": 1, "fragments": 1, "delay": 0, "mix": 0.0},
    bits=(32, 16),
    outer={"lr": 0.5, "momentum": 0.5},
    cut=7,
)
def test_other_options_go_on_from_the_anchor(moves, first, then, bits, outer, cut):
    """After finalize a run has other options, the same anchor and the same outer momentum.

    To itself a rank sends nothing, so alone it may have any number of bits, too.
    """
    sgd = partial(torch.optim.SGD, nesterov=outer["momentum"] > 0, **outer)
    parts = moves.slopes[:cut], moves.slopes[cut:]
    bits = bits if moves.ranks == 1 else (32, 32)

    def train(world: af.World) -> Values:
        state = moves.state(world, af.chain())
        for slopes, chosen, each in zip(parts, (first, then), bits, strict=True):
            state = state.with_setup(af.diloco(outer=sgd, bits=each, **chosen))
            for _ in slopes:
                state = moves.step(state)
            state = af.finalize(state)
        return dict(state.params)

    expected = by_hand(moves, first, outer)
    for slopes in parts:
        for _ in slopes:
            expected.update()
        expected.finish()
        expected.go_on(**{n: v for n, v in then.items() if n != "bucket_cap_mb"})
    for rank, found in enumerate(simulate(moves.ranks, train)):
        assert close(found, expected.x[rank])


@given(
    moves=moves(ranks=st.sampled_from([2, 4]), equal=True),
    chosen=options(mix=0.0),
    bits=st.sampled_from([16, 8, 4]),
)
@example(  # parts of several blocks of bits, of which some have nothing to remember
    moves=Moves([[[0, 0, 0, 1], [0, 0, 0, 2]]], [[1, 1]], 70),
    chosen={"sync_every": 1, "fragments": 1, "delay": 0, "mix": 0.0},
    bits=8,
)
def test_nothing_is_lost_in_few_bits(moves, chosen, bits):
    """What the anchor moved by, and what ranks remember, is all that they sent, bit by bit.

    In the end what few bits left out is paid by the last exchange, or still remembered.
    """
    every, delay = chosen["sync_every"], chosen["delay"]

    def train(world: af.World) -> list[dict[str, Any]]:
        state = moves.state(world, af.diloco(outer=PLAIN, bits=bits, **chosen))
        slots = []
        for _ in moves.slopes:
            state = moves.step(state)
            slots.append(state.copy().slots["diloco"])
        return [*slots, af.finalize(state).slots["diloco"]]

    def sums(name: str, updates: Any) -> Any:
        each = [(u, rank) for u in updates for rank in range(moves.ranks)]
        return sum(
            (moves.slope(*one, name) for one in each), torch.zeros(moves.size).double()
        )

    *during, last = zip(*simulate(moves.ranks, train), strict=True)
    for i, name in enumerate(NAMES):
        f = i * chosen["fragments"] // 4
        first = f * every // chosen["fragments"]
        for slots in during:
            if str(f) in slots[0]["flights"]:
                continue  # part of it is on its way
            # between an exchange and its use, what ranks did is dropped
            kept = [
                u
                for u in range(slots[0]["sent"][f])
                if u < (first or every) or (u - first) % every >= delay
            ]
            assert torch.equal(gone(slots, name), sums(name, kept))
        if not delay:
            found = gone(last, name)
            assert torch.allclose(found, sums(name, range(len(moves.slopes))))


def gone(slots: Any, name: str) -> torch.Tensor:
    """Return what the anchor has moved by, for all ranks, and what these remember."""
    remembered = sum(each["error"][name] for each in slots)
    return remembered - slots[0]["anchor"][name] * len(slots)


@given(bits=st.sampled_from([16, 8, 4]), seed=st.integers(0, 99))
def test_what_a_rank_does_without_samples_leaves_nothing_out(bits, seed):
    """Nothing of it is taken, though momentum moves it, so it remembers what it did before."""

    def train(world: af.World) -> list[tuple[bool, Values]]:
        generator = torch.Generator().manual_seed(seed)
        state = linear_state(
            *(3, 2),
            optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9),
            data=af.Data(torch.randn(3, 3, generator=generator), global_batch_size=2),
            setup=af.chain(af.shard_data(), af.diloco(sync_every=1, bits=bits)),
            world=world,
        )
        step, found = af.make_step(lambda net, x: net(x).square().mean()), []
        for batch in af.batches(state, until_epoch=3):
            saw_some = batch.weights[0] != 0
            state, _ = step(state, batch)
            found.append((saw_some, state.copy().slots["diloco"]["error"]))
        return found

    first, second = simulate(2, train)
    assert [saw for saw, _ in first] == [True] * 6
    assert [saw for saw, _ in second] == [True, False] * 3
    for rank, found in enumerate((first, second)):
        for (_, before), (saw_some, after) in pairwise(found):
            kept = [torch.equal(before[name], after[name]) for name in before]
            assert all(kept) == (not saw_some), rank


MET = [[-1, 0, 0, 0], [-7, 0, 0, 1]]
"""Moves of two ranks, whose mean 4 bits cannot tell."""


@given(
    moves=moves(ranks=st.sampled_from([2, 3, 4]), equal=True),
    chosen=options(mix=0.0),
    bits=BITS,
    others=st.sampled_from([1, 2, 3, 5]),
)
@example(
    moves=Moves([[[0] * 4] * 2] * 5 + [MET] + [[[0] * 4] * 2], [[1, 1]] * 7, size=1),
    chosen={"sync_every": 6, "fragments": 1, "delay": 3, "mix": 0.0},
    bits=4,
    others=1,
)
@example(
    moves=Moves([[[0] * 4] * 3, [[0] * 4, [0] * 4, [0, 0, 0, 1]]], [[1] * 3] * 2, 70),
    chosen={"sync_every": 2, "fragments": 1, "delay": 1, "mix": 0.0},
    bits=16,
    others=1,
)
def test_other_ranks_go_on(moves, chosen, bits, others):
    """Loaded on another number of ranks nothing is lost: what flies lands as it would have."""
    setup = af.diloco(outer=PLAIN, bits=bits, **chosen)

    def mean(run: Any, field: str) -> Values:
        return {
            n: sum(each[field][n] for each in run) / len(run) for n in run[0][field]
        }

    def seen(state: af.TrainState) -> dict[str, Any]:
        slot = state.copy().slots["diloco"]
        held = {n: p.clone() for n, p in state.params.items()}
        counts = {str(i): torch.tensor(1.0 * w) for i, w in enumerate(slot["weights"])}
        return {
            "params": held,
            "seen": counts,
            "error": slot["error"],
            "anchor": slot["anchor"],
            "to round": [f for f in slot["flights"].values() if f.get("half") == 1],
        }

    with tempfile.TemporaryDirectory() as folder:

        def save(world: af.World) -> tuple[dict[str, Any], Values]:
            state = moves.state(world, setup)
            for _ in moves.slopes:
                state = moves.step(state)
            af.save(state, f"{folder}/it")
            found = seen(state)
            return found, af.finalize(state).params

        def go_on(world: af.World) -> tuple[dict[str, Any], Values]:
            state = af.load(moves.state(world, setup), f"{folder}/it")
            found = seen(state)
            return found, af.finalize(state).params

        before, after = simulate(moves.ranks, save), simulate(others, go_on)
    # what meets is rounded there and then, which is remembered
    early = [] if before[0][0]["to round"] else ["error"]
    for field in ("params", "seen", "anchor", *early):
        one, two = (mean([found for found, _ in r], field) for r in (before, after))
        assert close(one, two)
    assert close(dict(before[0][1]), dict(after[0][1]))


@given(
    size=st.sampled_from([1, 2, 3, 4]),
    chosen=options(),
    bits=BITS,
    rows=st.integers(1, 90),
)
def test_its_bytes_are_these(size, chosen, bits, rows):
    """A period sends each number once, in its bits, with few bytes more, and in buffers."""
    whole = bits == 32 and not chosen["delay"]
    chosen = {**chosen, "bucket_cap_mb": chosen["bucket_cap_mb"] if whole else 25}
    updates = 2 * chosen["sync_every"]
    slopes = [[[1] * 4] * size] * updates
    moves = Moves(slopes, [[1] * size] * updates, rows)
    setup = af.diloco(bits=bits, **chosen)

    def train(world: af.World) -> None:
        state = moves.state(world, setup)
        for _ in slopes:
            state = moves.step(state)

    log = [e for e in simulate(size, train).log if e.label == "diloco"]
    every, parts = chosen["sync_every"], chosen["fragments"]
    exchanges = sum(
        (t - f * every // parts) % every == 0
        for f in range(parts)
        for t in range(1, updates + 1)
    )
    fragment, sent = rows * 4 // parts, sum(each.num_bytes for each in log)
    if size == 1:
        assert sent == 0
    elif whole:
        room = max(1, int(chosen["bucket_cap_mb"] * 2**20) // 8)
        assert sent == 8 * (exchanges * fragment + len(log))
        assert all(each.num_bytes <= 8 * (room + 1) for each in log)
    elif bits == 32:
        assert sent == exchanges * 8 * (fragment + 1)
    else:
        first = [e for e in log if e.kind == "all_to_all_single"]
        half = [e for e in log if e.kind != "all_to_all_single"]
        each = num_bytes(part_size(fragment, size), bits)
        assert sum(e.num_bytes for e in first) == exchanges * size * (each + 8)
        landed = sum(e.num_bytes for e in half)
        assert landed % each == 0
        assert exchanges - parts <= landed // each <= exchanges


@given(
    ranks=st.sampled_from([2, 3]),
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=8),
    room=st.integers(1, 12),
    bits=st.sampled_from([16, 8, 4]),
)
def test_in_few_bits_a_bucket_has_what_fits(ranks, lengths, room, bits):
    """L10: at once cross as many parameters, in order, as have room in a bucket, or one."""

    def train(world: af.World) -> None:
        state = af.TrainState.create(
            model=lambda: nn.ParameterList(map(torch.zeros, lengths)),
            optimizer=PLAIN,
            setup=af.diloco(
                sync_every=1, bits=bits, bucket_cap_mb=room * 4 / 2**20, fragments=1
            ),
            world=world,
        )
        af.make_step(lambda model, _: sum(map(torch.sum, model)))(state, None)

    buckets = list[int]()
    for length in lengths:
        if buckets and buckets[-1] + length <= room:
            buckets[-1] += length
        else:
            buckets.append(length)
    log = simulate(ranks, train).log
    found = [e.num_bytes for e in log if e.kind == "all_to_all_single"]
    parts = [num_bytes(part_size(bucket, ranks), bits) for bucket in buckets]
    assert found == [ranks * (part + 8) for part in parts]
