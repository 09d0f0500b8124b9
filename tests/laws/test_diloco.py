# SPDX-License-Identifier: Apache-2.0
"""diloco is what its papers say, whatever crosses when, and in however many bits."""

import tempfile
from functools import partial
from typing import Any

import attrs
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

import accelfn as af
from accelfn.collectives.few_bits import num_bytes
from accelfn.collectives.in_few_bits import part_size
from accelfn.testing import simulate
from tests.laws.worlds import alone, params, trained, without_slots
from tests.strategies import Run, differences, runs, tensors

NAMES = "abcd"
PLAIN = partial(torch.optim.SGD, lr=1.0)
Values = dict[str, torch.Tensor]


class Four(nn.Module):
    """Four parameters of one size, which begin at 0."""

    def __init__(self, size: int) -> None:
        super().__init__()
        for name in NAMES:
            self.register_parameter(name, nn.Parameter(torch.zeros(size).double()))


@attrs.frozen
class Moves:
    """By how much each rank moves in each update, and the weight of what it has seen.

    Attributes:
        slopes: by update and rank, in eighths, of the four parameters.
        weights: by update and rank.
        size: of a parameter.
    """

    slopes: list[list[list[int]]]
    weights: list[list[int]]
    size: int

    @property
    def ranks(self) -> int:
        return len(self.weights[0])

    def slope(self, t: int, rank: int, name: str) -> torch.Tensor:
        """Return a gradient, whose elements differ."""
        slope = self.slopes[t][rank][NAMES.index(name)]
        return slope * torch.arange(1, self.size + 1).double() / 8

    def state(self, world: af.World, setup: object) -> af.TrainState:
        return af.TrainState.create(
            model=partial(Four, self.size), optimizer=PLAIN, setup=setup, world=world
        )

    def step(
        self, state: af.TrainState, at: int | None = None, *, still: bool = False
    ) -> af.TrainState:
        """Take an update, by default the next; one that is still moves nothing."""
        t, rank = state.step if at is None else at, state.world.rank
        weight = self.weights[t][rank]

        def loss(model: nn.Module, _: object) -> af.Loss:
            each = [(getattr(model, n) * self.slope(t, rank, n)).sum() for n in NAMES]
            return af.Loss(sum(each) * weight * (not still), weight)

        return af.make_step(loss)(state, None)[0]


@st.composite
def moves(draw: st.DrawFn, *, ranks: Any = None, equal: bool = False) -> Moves:
    size = draw(st.integers(1, 4) if ranks is None else ranks)
    updates = draw(st.integers(1, 9))
    four = st.lists(st.integers(-8, 8), min_size=4, max_size=4)
    slopes = st.lists(four, min_size=size, max_size=size)
    some = st.integers(0, 3) if draw(st.integers(0, 3)) else st.just(0)  # of nobody
    seen = st.just(1) if equal else some
    weights = st.lists(seen, min_size=size, max_size=size)
    return Moves(
        draw(st.lists(slopes, min_size=updates, max_size=updates)),
        draw(st.lists(weights, min_size=updates, max_size=updates)),
        draw(st.sampled_from([1, 3, 70])),
    )


@st.composite
def options(draw: st.DrawFn, **fixed: Any) -> dict[str, Any]:
    every = draw(
        st.sampled_from([1, 2, 3, 4, 6])
    )  # of 6, four fragments are no fourths
    drawn = {
        "sync_every": every,
        "fragments": draw(st.sampled_from([n for n in (1, 2, 4) if n <= every])),
        "delay": draw(st.integers(0, every - 1)),
        "mix": draw(st.sampled_from([0.0, 0.5, 0.25])),
        "bucket_cap_mb": draw(st.sampled_from([25, 1e-6, 3e-5])),
    }
    return {**drawn, **fixed}


OUTER = st.fixed_dictionaries(
    {
        "lr": st.sampled_from([0.5, 1.0, 0.7]),
        "momentum": st.sampled_from([0.0, 0.5, 0.9]),
    }
)


@attrs.define
class ByHand:
    """DiLoCo, and its streaming kin, as their papers have it, in plain Python."""

    moves: Moves
    sync_every: int
    fragments: int
    delay: int
    mix: float
    lr: float
    momentum: float
    t: int = 0
    x: list[Values] = attrs.field(init=False)
    anchor: Values = attrs.field(init=False)
    velocity: Values = attrs.field(factory=dict)
    seen: list[dict[int, int]] = attrs.field(init=False)
    flying: list[tuple[int, int, Values | None]] = attrs.field(factory=list)
    sent: dict[int, int] = attrs.field(factory=dict)

    def __attrs_post_init__(self) -> None:
        zero = torch.zeros(self.moves.size).double()
        self.anchor = {n: zero.clone() for n in NAMES}
        self.x = [{n: zero.clone() for n in NAMES} for _ in range(self.moves.ranks)]
        self.seen = [dict.fromkeys(range(self.fragments), 0) for _ in self.x]

    def update(self) -> None:
        """Take an update on all ranks."""
        for rank, x in enumerate(self.x):
            weight = self.moves.weights[self.t][rank]
            for name in NAMES:
                if weight:
                    x[name] = x[name] - self.moves.slope(self.t, rank, name)
            for f in self.seen[rank]:
                self.seen[rank][f] += weight
        self.t += 1
        for f in range(self.fragments):
            if (self.t - f * self.sync_every // self.fragments) % self.sync_every == 0:
                self.flying.append((self.t, f, self.mean(f)))
        for sent, f, mean in list(self.flying):
            if self.t == sent + self.delay:
                self.flying.remove((sent, f, mean))
                self.land(mean)

    def finish(self) -> None:
        """Land what flies, exchange what was done since, and go to the anchor."""
        for _, _, mean in self.flying:
            self.land(mean)
        for f in range(self.fragments):
            if self.t > self.sent.get(f, 0):
                self.land(self.mean(f, waits=True))
        self.x = [dict(self.anchor) for _ in self.x]

    def mean(self, f: int, *, waits: bool = False) -> Values | None:
        """Return by how much a fragment moved; None where nobody saw anything."""
        self.sent[f] = self.t
        seen = [each[f] for each in self.seen]
        for each in self.seen:
            each[f] = 0
        if not any(seen):
            if self.delay and not waits:
                return None
            seen = [1] * len(self.x)
        count = len(NAMES) // self.fragments
        return {
            name: sum(
                w * (self.anchor[name] - x[name])
                for w, x in zip(seen, self.x, strict=True)
            )
            / sum(seen)
            for name in NAMES[f * count : (f + 1) * count]
        }

    def land(self, mean: Values | None) -> None:
        for name, d in (mean or {}).items():
            if name in self.velocity:
                self.velocity[name] = self.momentum * self.velocity[name] + d
            else:
                self.velocity[name] = d
            moved = d + self.momentum * self.velocity[name]
            self.anchor[name] = self.anchor[name] - self.lr * moved
            for x in self.x:
                x[name] = self.mix * x[name] + (1 - self.mix) * self.anchor[name]


def close(one: Values, two: Values) -> bool:
    return all(torch.allclose(one[n], two[n], rtol=0, atol=1e-12) for n in two)


@given(moves=moves(), chosen=options(), outer=OUTER)
def test_it_is_what_the_papers_say(
    moves: Moves, chosen: dict[str, Any], outer: dict[str, float]
) -> None:
    """After each update, and in the end, ranks hold what a few lines of arithmetic give."""
    nesterov = outer["momentum"] > 0
    sgd = partial(torch.optim.SGD, nesterov=nesterov, **outer)

    def train(world: af.World) -> list[tuple[Values, ...]]:
        state = moves.state(world, af.diloco(outer=sgd, **chosen))
        found = []
        for _ in moves.slopes:
            state = moves.step(state)
            view = af.eval_params(state)
            found.append(
                tuple(
                    {n: p.clone() for n, p in v.items()} for v in (state.params, view)
                )
            )
        return [*found, (af.finalize(state).params,) * 2]

    hand = {n: v for n, v in chosen.items() if n != "bucket_cap_mb"}
    expected = ByHand(moves, **hand, **outer)
    for t, found in enumerate(zip(*simulate(moves.ranks, train), strict=True)):
        if t < len(moves.slopes):
            expected.update()
        else:
            expected.finish()
        for rank, (held, evaluated) in enumerate(found):
            assert close(held, expected.x[rank])
            assert close(evaluated, expected.anchor)


@given(
    run=runs(updates=3, remainder="short"),
    size=st.sampled_from([2, 3]),
    every=st.integers(1, 3),
)
def test_a_plain_outer_step_is_local_sgd(run: Run, size: int, every: int) -> None:
    """With SGD(lr=1.0) outside it is local_sgd, whatever trains inside."""
    one = trained(size, run, af.shard_data(), af.local_sgd(sync_every=every))
    outer = af.diloco(sync_every=every, outer=PLAIN)
    two = trained(size, run, af.shard_data(), outer)
    for (first, _), (second, _) in zip(one, two, strict=True):
        for here, there in zip(first, second, strict=True):
            assert differences(params(here), params(there), within=1e-9) == []


@given(run=runs(optimizer="adamw", updates=3))
def test_alone_every_update_is_the_inner_optimizer(run: Run) -> None:
    """In a world of 1, averaging by SGD(lr=1.0) after each update changes nothing."""
    expected, _ = alone(run)
    found, _ = alone(run, af.diloco(sync_every=1, outer=PLAIN))
    left, right = (without_slots(each[-1]) for each in (expected, found))
    assert differences(left, right, within=1e-12) == []


@given(
    moves=moves(ranks=st.sampled_from([2, 4]), equal=True),
    chosen=options(mix=0.0),
    bits=st.sampled_from([16, 8, 4]),
)
def test_nothing_is_lost_in_few_bits(
    moves: Moves, chosen: dict[str, Any], bits: int
) -> None:
    """What the anchor moved by, and what ranks remember, is all that they sent, bit by bit."""

    def train(world: af.World) -> list[dict[str, Any]]:
        state = moves.state(world, af.diloco(outer=PLAIN, bits=bits, **chosen))
        found = []
        for _ in moves.slopes:
            state = moves.step(state)
            slot = state.copy().slots["diloco"]
            found.append({n: slot[n] for n in ("anchor", "error", "sent", "flights")})
        return found

    every, count = chosen["sync_every"], 4 // chosen["fragments"]
    for found in zip(*simulate(moves.ranks, train), strict=True):
        for i, name in enumerate(NAMES):
            f = i // count
            sent = found[0]["sent"][f]
            if str(f) in found[0]["flights"]:
                continue  # part of it is on its way
            first = f * every // chosen["fragments"]
            # between an exchange and its use, what ranks did is dropped
            kept = [
                u
                for u in range(sent)
                if u < (first or every) or (u - first) % every >= chosen["delay"]
            ]
            moved = sum(
                moves.slope(u, rank, name) for u in kept for rank in range(moves.ranks)
            )
            remembered = sum(each["error"][name] for each in found)
            gone = -found[0]["anchor"][name] * moves.ranks + remembered
            assert torch.equal(gone, torch.zeros(moves.size).double() + moved)


@given(
    moves=moves(ranks=st.sampled_from([2, 4]), equal=True),
    chosen=options(mix=0.0, delay=0),
    bits=st.sampled_from([16, 8, 4]),
)
def test_in_the_end_nothing_is_lost_either(
    moves: Moves, chosen: dict[str, Any], bits: int
) -> None:
    """What few bits left out is paid by the last exchange, or still remembered."""

    def train(world: af.World) -> tuple[Values, Values]:
        state = moves.state(world, af.diloco(outer=PLAIN, bits=bits, **chosen))
        for _ in moves.slopes:
            state = moves.step(state)
        state = af.finalize(state)
        return dict(state.params), state.slots["diloco"]["error"]

    found = list(simulate(moves.ranks, train))
    for name in NAMES:
        owed = sum(error[name] for _, error in found)
        gone = owed - found[0][0][name] * moves.ranks
        each = [(t, r) for t in range(len(moves.slopes)) for r in range(moves.ranks)]
        assert torch.allclose(gone, sum(moves.slope(*one, name) for one in each))


@given(
    moves=moves(),
    chosen=options(),
    bits=st.sampled_from([32, 16, 8, 4]),
    looks=st.sets(st.integers(1, 9)),
)
def test_who_looks_early_changes_nothing(
    moves: Moves, chosen: dict[str, Any], bits: int, looks: set[int]
) -> None:
    """A copy, a save and a look at the anchor communicate nothing, and change no bit."""

    def train(world: af.World, looks: set[int]) -> dict[str, torch.Tensor]:
        state = moves.state(world, af.diloco(bits=bits, **chosen))
        for t, _ in enumerate(moves.slopes, start=1):
            state = moves.step(state)
            if t in looks:
                af.eval_params(state)
                state = state.copy()
        return tensors(state)

    plain, looked = (
        simulate(moves.ranks, partial(train, looks=some)) for some in (set(), looks)
    )
    assert [(e.kind, e.num_bytes) for e in plain.log] == [
        (e.kind, e.num_bytes) for e in looked.log
    ]
    for one, two in zip(plain, looked, strict=True):
        assert differences(one, two) == []


@given(
    moves=moves(),
    chosen=options(),
    bits=st.sampled_from([32, 16, 8, 4]),
)
def test_ranks_agree_in_the_end(
    moves: Moves, chosen: dict[str, Any], bits: int
) -> None:
    """All ranks have one anchor at any time; in the end they are there, and owe nothing."""

    def train(world: af.World) -> list[Values]:
        state, found = moves.state(world, af.diloco(bits=bits, **chosen)), []
        for _ in moves.slopes:
            state = moves.step(state)
            found.append({n: p.clone() for n, p in af.eval_params(state).items()})
        sent = state.slots["diloco"]["sent"]
        state = af.finalize(state)
        slot = state.slots["diloco"]
        assert slot["flights"] == {}
        for i, name in enumerate(NAMES if slot["error"] else ""):
            if sent[i * chosen["fragments"] // 4] < state.step:
                assert not slot["error"][name].any()
        again = af.finalize(state.copy())
        assert differences(tensors(state), tensors(again)) == []
        return [*found, dict(af.eval_params(state)), dict(state.params)]

    first, *others = simulate(moves.ranks, train)
    for other in others:
        for one, two in zip(first, other, strict=True):
            assert differences(one, two) == []
    assert differences(first[-1], first[-2]) == []


MET = [[-1, 0, 0, 0], [-7, 0, 0, 1]]
"""Moves of two ranks, whose mean 4 bits cannot tell."""


@given(
    moves=moves(ranks=st.sampled_from([2, 3, 4]), equal=True),
    chosen=options(mix=0.0),
    bits=st.sampled_from([32, 16, 8, 4]),
    others=st.sampled_from([1, 2, 3, 5]),
)
@example(
    moves=Moves([[[0] * 4] * 2] * 5 + [MET] + [[[0] * 4] * 2], [[1, 1]] * 7, size=1),
    chosen={
        "sync_every": 6,
        "fragments": 1,
        "delay": 3,
        "mix": 0.0,
        "bucket_cap_mb": 25,
    },
    bits=4,
    others=1,
)
def test_other_ranks_go_on(
    moves: Moves, chosen: dict[str, Any], bits: int, others: int
) -> None:
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
    bits=st.sampled_from([32, 16, 8, 4]),
    rows=st.integers(1, 90),
)
def test_its_bytes_are_these(
    size: int, chosen: dict[str, Any], bits: int, rows: int
) -> None:
    """A period sends each number once, in its bits, and a few bytes for weights and scales.

    No message has more numbers than a buffer has room for, unless it flies.
    """
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
    fragment = rows * 4 // chosen["fragments"]
    exchanges = sum(
        t
        and (t - f * chosen["sync_every"] // chosen["fragments"]) % chosen["sync_every"]
        == 0
        for f in range(chosen["fragments"])
        for t in range(1, updates + 1)
    )
    sent = sum(each.num_bytes for each in log)
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
        assert exchanges - chosen["fragments"] <= landed // each <= exchanges
