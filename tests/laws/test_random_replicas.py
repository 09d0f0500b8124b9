# SPDX-License-Identifier: Apache-2.0
"""Ranks that train apart are as many plain loops, averaged by hand.

Whatever is beside it: moving averages, skips, clipping, frozen parameters, batch statistics,
uneven and empty shares, averages in mid-period, and a resume on as many ranks or others.
"""

import copy
import math
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

import accelfn as af
from accelfn.testing import simulate
from tests.strategies import differences

Found = dict[str, torch.Tensor]
OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.1, weight_decay=0.25),
    "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.5),
    "adam": partial(torch.optim.Adam, lr=0.05, eps=1e-3),
    "fused": partial(torch.optim.AdamW, lr=0.05, eps=1e-3, fused=True),
}


class Net(nn.Module):
    """Two layers, and the running mean of what they see, in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(3, 2), nn.Linear(2, 1)
        self.double()
        self.register_buffer("seen", torch.zeros(3, dtype=torch.float64))
        for i, param in enumerate(self.parameters()):
            ramp = torch.arange(param.numel(), dtype=torch.float64).view_as(param)
            param.data = (ramp + i) % 3 / 2 - 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen.lerp_(x.mean(0), 0.5)
        return self.head(torch.tanh(self.first(x)))


def total_of(net: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    x, weights = batch
    return (net(x)[:, 0].square() * weights).sum(), weights.sum()


def loss_fn(net: nn.Module, batch: Any) -> af.Loss:
    return af.Loss(*total_of(net, batch))


@attrs.frozen
class Setup:
    """Ranks, what they are averaged by, and what is beside it."""

    sizes: tuple[int, int] = (2, 2)
    every: int = 1
    opt_state: bool = False
    buffers: bool = False
    optimizer: str = "sgd"
    decay: float | None = None
    average_first: bool = False
    clip: float | None = None
    micro: int = 1
    judge: str | None = None
    broken: int | None = None
    n: int = 8
    batch_size: int = 1
    seed: int = 0
    updates: int = 1
    cut: int = 0
    finalized: tuple[int, ...] = ()
    frozen_from: int = 0

    def samples(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and their weights, whole batches of which may be 0."""
        generator = torch.Generator().manual_seed(self.seed)
        x = torch.randn(self.n, 3, generator=generator, dtype=torch.float64)
        weights = torch.randint(0, 3, (self.n,), generator=generator).double()
        weights[: self.seed % 5] = 0
        if self.broken is not None:
            x[self.broken] = math.nan
        return x, weights

    def rows(self) -> list[list[int]]:
        """Return the samples of each batch, in their own order."""
        starts = range(0, self.n, self.batch_size)
        epoch = [list(range(i, min(i + self.batch_size, self.n))) for i in starts]
        return (epoch * self.updates)[: self.updates]

    def state(self, world: af.World) -> af.TrainState:
        judges = {
            "skip": af.skip_nonfinite(),
            "fp16": af.autocast("fp16", init_scale=64.0, growth_interval=1),
        }
        ema = None if self.decay is None else af.ema(self.decay)
        local = af.local_sgd(
            sync_every=self.every, opt_state=self.opt_state, buffers=self.buffers
        )
        pair = (ema, local) if self.average_first else (local, ema)
        return af.TrainState.create(
            model=Net,
            optimizer=OPTIMIZERS[self.optimizer],
            data=af.Data(self.samples(), global_batch_size=self.batch_size),
            setup=af.chain(
                af.shard_data(),
                af.accumulate(num_micro_batches=self.micro),
                None if self.judge is None else judges[self.judge],
                None if self.clip is None else af.clip_grad_norm(self.clip),
                *pair,
            ),
            world=world,
        )


class Replica:
    def __init__(self, setup: Setup) -> None:
        self.setup, self.net = setup, Net()
        self.optimizer = OPTIMIZERS[setup.optimizer](self.net.parameters())
        if "fused" in self.optimizer.defaults:
            for group in self.optimizer.param_groups:
                group["fused"] = False
        self.average = {n: p.detach().clone() for n, p in self.net.named_parameters()}
        self.weight = 0.0

    def look(self, rows: list[int]) -> tuple[float, float, torch.Tensor]:
        """Take the gradient of this rank's share; return total, weight and buffer."""
        x, weights = self.setup.samples()
        kept, sums = self.net.seen.clone(), torch.zeros(2, dtype=torch.float64)
        for param in self.net.parameters():
            param.grad = torch.zeros_like(param) if param.requires_grad else None
        for part in torch.tensor(rows).tensor_split(self.setup.micro):
            if len(part):
                total, weight = total_of(self.net, (x[part], weights[part]))
                total.backward()
                sums += torch.stack([total.detach(), weight])
        for param in self.trained:
            param.grad.div_(sums[1] or 1.0)
        seen = self.net.seen.clone()
        self.net.seen.copy_(kept)
        return float(sums[0]), float(sums[1]), seen

    @property
    def trained(self) -> list[Any]:
        return [param for param in self.net.parameters() if param.requires_grad]

    def step(self, weight: float, seen: torch.Tensor) -> None:
        if self.setup.clip is not None:
            flat = torch.cat([param.grad.flatten() for param in self.trained])
            if flat.norm() > self.setup.clip:
                for param in self.trained:
                    param.grad.mul_(self.setup.clip / flat.norm())
        self.optimizer.step()
        self.net.seen.copy_(seen)
        self.weight += weight

    def follow(self) -> None:
        for name, param in self.net.named_parameters():
            decay = self.setup.decay or 0.0
            self.average[name].mul_(decay).add_((1 - decay) * param.detach())

    def moments(self) -> list[torch.Tensor]:
        entries = [self.optimizer.state[p] for p in self.net.parameters()]
        return [
            value
            for entry in entries
            for name, value in sorted(entry.items())
            if isinstance(value, torch.Tensor) and name != "step"
        ]

    def params(self) -> Found:
        return {n: p.detach().clone() for n, p in self.net.named_parameters()}


def mean_(lists: list[list[torch.Tensor]], weights: list[float]) -> None:
    """Set tensors of all ranks to their mean by weight; without any, ranks count alike."""
    weights = weights if any(weights) else [1.0] * len(weights)
    for same in zip(*lists, strict=True):
        mean = sum(w * t.detach() for w, t in zip(weights, same, strict=True))
        for tensor in same:
            tensor.data.copy_(mean / sum(weights))


@attrs.frozen
class Moment:
    """What a rank has behind an update, and what is evaluated."""

    params: Found
    evaluated: Found
    moments: Found
    seen: torch.Tensor
    loss: float
    skipped: int


def by_hand(setup: Setup) -> list[list[Moment]]:
    """Train all ranks in plain torch; return what each has behind each update."""
    ranks = [Replica(setup) for _ in range(setup.sizes[0])]
    step, since, skipped, moments = 0, 0, 0, list[list[Moment]]()
    for i, rows in enumerate(setup.rows()):
        if i == setup.cut and setup.sizes[1] != len(ranks):
            ranks = others(ranks, setup)
        if i == setup.frozen_from:
            for rank in ranks:
                rank.net.first.requires_grad_(requires_grad=False)
        shares = torch.tensor(rows).tensor_split(len(ranks))
        looks = [r.look(share.tolist()) for r, share in zip(ranks, shares, strict=True)]
        total, weight = (sum(look[k] for look in looks) for k in (0, 1))
        finite = all(bool(p.grad.isfinite().all()) for r in ranks for p in r.trained)
        if finite:
            for rank, (_, own, seen) in zip(ranks, looks, strict=True):
                rank.step(own, seen)
            step += 1
            since = _behind_(ranks, setup, step, since)
        skipped += not finite
        if i in setup.finalized and step > since:
            since = _together_(ranks, setup, step)
        loss = total / weight if weight else 0.0
        evaluated = _evaluated(ranks, setup, agree=step == since)
        moments.append(
            [
                Moment(
                    *(
                        rank.params(),
                        evaluated,
                        {str(i): t.clone() for i, t in enumerate(rank.moments())},
                        rank.net.seen.clone(),
                    ),
                    *(loss, skipped),
                )
                for rank in ranks
            ]
        )
    return moments


def _behind_(ranks: list[Replica], setup: Setup, step: int, since: int) -> int:
    """Do what is done behind an update; return at which ranks were averaged last."""
    for rank in ranks if setup.average_first else ():
        rank.follow()
    if step - since == setup.every:
        since = _together_(ranks, setup, step)
    for rank in () if setup.average_first else ranks:
        rank.follow()
    return since


def _together_(ranks: list[Replica], setup: Setup, step: int) -> int:
    """Average what is to be averaged, and return the update at which."""
    tensors = [
        [
            *rank.net.parameters(),
            *([rank.net.seen] if setup.buffers else []),
            *(rank.moments() if setup.opt_state else []),
        ]
        for rank in ranks
    ]
    if len(ranks) > 1:
        mean_(tensors, [rank.weight for rank in ranks])
    for rank in ranks:
        rank.weight = 0.0
    return step


def _evaluated(ranks: list[Replica], setup: Setup, *, agree: bool) -> Found:
    averages = [
        rank.average if setup.decay is not None else rank.params() for rank in ranks
    ]
    copies = [{n: p.clone() for n, p in each.items()} for each in averages]
    weights = [0.0 if agree else rank.weight for rank in ranks]
    if len(ranks) > 1:
        mean_([list(each.values()) for each in copies], weights)
    return copies[0]


def others(ranks: list[Replica], setup: Setup) -> list[Replica]:
    """Return other ranks in place of these, which go on from the mean by what each has seen."""
    mean_(
        [
            [*rank.net.parameters(), *rank.moments(), *rank.average.values()]
            for rank in ranks
        ],
        [rank.weight for rank in ranks],
    )
    fresh = [Replica(setup) for _ in range(setup.sizes[1])]
    for rank in fresh:
        rank.net.load_state_dict(ranks[0].net.state_dict())
        rank.net.seen.fill_(math.nan)  # a mean, or rank 0's: another law's
        rank.net.first.requires_grad_(ranks[0].net.first.weight.requires_grad)
        rank.optimizer.load_state_dict(copy.deepcopy(ranks[0].optimizer.state_dict()))
        rank.average = {n: p.clone() for n, p in ranks[0].average.items()}
    return fresh


def train(setup: Setup, folder: Path, world: af.World, *, first: bool) -> list[Moment]:
    """Train to the cut and save, or load and train from there to the end."""

    def frozen(state, at):
        if at < setup.frozen_from:
            return state
        return state.with_trainable(lambda name, _: name.startswith("head"))

    state, begin = setup.state(world), 0 if first else setup.cut
    if not first:
        state = af.load(frozen(state, begin - 1), folder)
    end = setup.cut if first else setup.updates
    step, moments = af.make_step(loss_fn), list[Moment]()
    for i in range(begin, end):
        state = frozen(state, i)
        state, metrics = step(state, next(iter(af.batches(state))))
        if i in setup.finalized:
            state = af.finalize(state)
        kept = [
            value.clone()
            for name in state.params
            for key, value in sorted(state.opt_state.get(name, {}).items())
            if isinstance(value, torch.Tensor) and key != "step"
        ]
        moments.append(
            Moment(
                {n: p.clone() for n, p in state.params.items()},
                {n: p.clone() for n, p in af.eval_params(state).items()},
                {str(i): value for i, value in enumerate(kept)},
                state.buffers["seen"].clone(),
                float(metrics.all_reduce_mean(world)["loss"]),
                state.num_skipped,
            )
        )
    if first:
        af.save(state, folder)
    return moments


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    n, updates = draw(st.integers(3, 12)), draw(st.integers(1, 7))
    judge = draw(st.sampled_from([None, "skip", "fp16"]))
    sizes = st.sampled_from([(2, 2), (3, 3), (2, 3), (3, 2), (2, 1), (1, 2), (4, 2)])
    return Setup(
        sizes=draw(sizes),
        every=draw(st.integers(1, 4)),
        opt_state=draw(st.booleans()),
        buffers=draw(st.booleans()),
        optimizer=draw(st.sampled_from(sorted(OPTIMIZERS))),
        decay=draw(st.none() | st.sampled_from([0.5, 0.75])),
        average_first=draw(st.booleans()),
        clip=draw(st.none() | st.sampled_from([0.05, 0.5])),
        micro=draw(st.integers(1, 2)),
        judge=judge,
        broken=None if judge is None else draw(st.none() | st.integers(0, n - 1)),
        n=n,
        batch_size=draw(st.integers(1, 7)),
        seed=draw(st.integers(0, 99)),
        updates=updates,
        cut=draw(st.integers(0, updates)),
        finalized=tuple(draw(st.sets(st.integers(0, updates), max_size=2))),
        frozen_from=draw(st.integers(0, 2 * updates)),
    )


AVERAGED = Setup(sizes=(2, 3), optimizer="adam", n=3, updates=2, cut=1)
"""Loaded on more ranks just after an average."""


@given(setup=setups())
@example(AVERAGED)
def test_ranks_apart_are_loops_apart(setup):
    """Each rank holds what a loop of its own holds, and all evaluate the mean of the loops."""
    with tempfile.TemporaryDirectory() as folder:
        halves = [
            simulate(
                size, partial(train, setup, Path(folder) / "saved", first=first)
            ).results
            for size, first in zip(setup.sizes, (True, False), strict=True)
        ]
    found = [ranks for half in halves for ranks in zip(*half, strict=True)]
    for expected, ranks in zip(by_hand(setup), found, strict=True):
        for one, two in zip(expected, ranks, strict=True):
            for field in ("params", "evaluated", "moments"):
                values = (getattr(each, field) for each in (one, two))
                assert differences(*values, within=1e-9) == []
            known = ~one.seen.isnan()
            assert torch.allclose(one.seen[known], two.seen[known], rtol=1e-9)
            loss = pytest.approx(two.loss, rel=1e-9, abs=1e-9, nan_ok=True)
            assert one.loss == loss
            assert one.skipped == two.skipped
