# SPDX-License-Identifier: Apache-2.0
"""What PowerSGD leaves out is lost to nothing that is beside it.

Loss scales that grow and fall, skips, batches without weight, empty shares, micro-batches,
an optimizer in the backward pass, parameters that are frozen for a while, and a resume on other
ranks with another setup: what was applied, and the mean
of what the ranks have left, add up to the gradients, which plain torch takes.
"""

import math
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import accelfn as af
from accelfn.testing import simulate

LR = 0.125
Found = dict[str, torch.Tensor]


class Net(nn.Module):
    """Two layers in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, 3), nn.Linear(3, 2)
        self.double()
        for i, param in enumerate(self.parameters()):
            ramp = torch.arange(param.numel(), dtype=torch.float64).view_as(param)
            param.data = ((ramp + i) * 7 % 5 - 2) / 4

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.first(x)))


def total_of(net: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    x, y, weights = batch
    return ((net(x) - y).square().sum(1) * weights).sum(), weights.sum()


def loss_fn(net: nn.Module, batch: Any) -> af.Loss:
    return af.Loss(*total_of(net, batch))


@attrs.frozen
class Setup:
    """How gradients are compressed, and what is beside it, before and after a cut."""

    sizes: tuple[int, int]
    beside: tuple[str, str]
    start: int
    rank: int
    bucket: float
    broken: int | None
    n: int
    batch_size: int
    seed: int
    updates: int
    cut: int
    frozen: range

    def samples(self) -> tuple[torch.Tensor, ...]:
        """Return inputs, targets and weights, whole batches of which may be 0."""
        generator = torch.Generator().manual_seed(self.seed)
        draw = partial(torch.randn, generator=generator, dtype=torch.float64)
        x, y = draw(self.n, 4), draw(self.n, 2)
        weights = torch.randint(0, 3, (self.n,), generator=generator).double()
        weights[: self.seed % 5] = 0
        if self.broken is not None:
            x[self.broken] = math.nan
        return x, y, weights

    def chain(self, beside: str) -> af.chain:
        """Return the transforms."""
        transforms = {
            "nothing": (),
            "micro-batches": (af.accumulate(num_micro_batches=2),),
            "in backward": (af.optimizer_in_backward(),),
            # both its scale and the unit of its losses move
            "fp16": (
                af.autocast(
                    "fp16", init_scale=64.0, growth_factor=8.0, growth_interval=1
                ),
                af.accumulate(num_micro_batches=2),
            ),
            "skips": (af.skip_nonfinite(),),
        }
        compress = af.compress_grads(
            "powersgd",
            matrix_approximation_rank=self.rank,
            start_powerSGD_iter=self.start,
            min_compression_rate=0,
        )
        ddp = af.wrap_ddp(bucket_cap_mb=self.bucket)
        return af.chain(af.shard_data(), ddp, compress, *transforms[beside])

    def state(self, world: af.World) -> af.TrainState:
        """Return the state before the first update."""
        return af.TrainState.create(
            model=Net,
            optimizer=partial(torch.optim.SGD, lr=LR),
            data=af.Data(self.samples(), global_batch_size=self.batch_size),
            setup=self.chain(self.beside[0]),
            world=world,
        )

    def gradient(self, params: Found, update: int) -> Found:
        """Return the gradient of a batch, in plain torch."""
        starts = range(0, self.n, self.batch_size)
        begin = starts[update % len(starts)]
        batch = [each[begin : begin + self.batch_size] for each in self.samples()]
        net = Net()
        net.load_state_dict(params)
        net.head.requires_grad_(update not in self.frozen)
        total, weight = total_of(net, batch)
        (total / (weight or 1.0)).backward()
        return {n: p.grad for n, p in net.named_parameters() if p.grad is not None}


@attrs.frozen
class Moment:
    """What a rank holds behind an update."""

    params: Found
    left: Found
    count: int


def train(setup: Setup, folder: Path, world: af.World, *, first: bool) -> list[Moment]:
    """Train to the cut and save, or load and train from there to the end."""
    state = setup.state(world)
    if not first:
        state = af.load(state, folder, allow=("trainable",))
        state = state.with_setup(setup.chain(setup.beside[1]))
    step, moments = af.make_step(loss_fn), list[Moment]()
    for i in range(setup.cut) if first else range(setup.cut, setup.updates):
        thawed = i not in setup.frozen
        state = state.with_trainable(
            lambda name, _, all_=thawed: all_ or "first" in name
        )
        state, _ = step(state, next(iter(af.batches(state))))
        slot = state.slots["compress_grads"]
        left = {name: error.clone() for name, error in slot["error"].items()}
        params = {name: param.clone() for name, param in state.params.items()}
        moments.append(Moment(params, left, slot["iter"]))
    if first:
        af.save(state, folder)
    return moments


BESIDE = ["nothing", "micro-batches", "in backward", "fp16", "skips"]


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    n, updates = draw(st.integers(2, 10)), draw(st.integers(1, 7))
    beside = draw(st.tuples(st.sampled_from(BESIDE), st.sampled_from(BESIDE)))
    judged = all(each in ("fp16", "skips") for each in beside)
    return Setup(
        sizes=draw(st.tuples(st.integers(2, 3), st.integers(2, 3))),
        beside=beside,
        start=draw(st.integers(0, 2)),
        rank=draw(st.integers(1, 2)),
        bucket=draw(st.sampled_from([25.0, 1e-5])),
        broken=draw(st.none() | st.integers(0, n - 1)) if judged else None,
        n=n,
        batch_size=draw(st.integers(1, 6)),
        seed=draw(st.integers(0, 99)),
        updates=updates,
        cut=draw(st.integers(0, updates)),
        frozen=range(draw(st.integers(0, updates)), draw(st.integers(0, updates))),
    )


@given(setup=setups())
def test_nothing_that_is_left_out_is_lost(setup: Setup) -> None:
    """After each update the gradients of all so far are what moved the parameters and is left."""
    with tempfile.TemporaryDirectory() as folder:
        halves = [
            simulate(
                size, partial(train, setup, Path(folder) / "saved", first=first)
            ).results
            for size, first in zip(setup.sizes, (True, False), strict=True)
        ]
    found = [ranks for half in halves for ranks in zip(*half, strict=True)]
    begun = {name: param.detach() for name, param in Net().named_parameters()}
    params, taken, compressed = begun, 0, set[str]()
    sums = {name: torch.zeros_like(param) for name, param in begun.items()}
    for update, ranks in enumerate(found):
        gradient = setup.gradient(params, update)
        if all(bool(each.isfinite().all()) for each in gradient.values()):
            sums |= {name: sums[name] + each for name, each in gradient.items()}
            taken += 1
            if taken > setup.start:
                compressed |= {name for name in gradient if "weight" in name}
        params = ranks[0].params
        for name, expected in sums.items():
            applied = (begun[name] - params[name]) / LR
            left = [rank.left[name] for rank in ranks if name in rank.left]
            left = sum(left, torch.zeros_like(applied)) / len(ranks)
            assert torch.allclose(expected, applied + left, rtol=1e-9, atol=1e-9)
            assert all(torch.equal(params[name], rank.params[name]) for rank in ranks)
        assert all(rank.left.keys() == compressed for rank in ranks)
        assert all(rank.count == taken for rank in ranks)
