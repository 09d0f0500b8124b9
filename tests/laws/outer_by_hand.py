# SPDX-License-Identifier: Apache-2.0
"""DiLoCo in plain Python, and trainings drawn for it."""

from functools import partial
from typing import Any

import attrs
import torch
from hypothesis import strategies as st
from torch import nn

import accelfn as af

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
    begun: int = 0
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
            first = self.begun + f * self.sync_every // self.fragments
            if (self.t - first) % self.sync_every == 0:
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
            if self.t > self.sent.get(f, self.begun):
                self.land(self.mean(f, waits=True))
        self.x = [dict(self.anchor) for _ in self.x]

    def go_on(self, sync_every: int, fragments: int, delay: int, mix: float) -> None:
        """Have other options from here, where all is finished."""
        self.sync_every, self.fragments = sync_every, fragments
        self.delay, self.mix, self.begun = delay, mix, self.t
        self.seen = [dict.fromkeys(range(fragments), 0) for _ in self.x]
        self.flying, self.sent = [], {}

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
