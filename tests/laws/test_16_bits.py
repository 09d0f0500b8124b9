# SPDX-License-Identifier: Apache-2.0
"""Gradients that are sent in 16 bits: what they can hold is exact, what they cannot is rounded."""

import functools
from collections.abc import Mapping
from typing import Any

import attrs
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import accelfn as af
from accelfn.testing import simulate
from tests.internals import transform
from tests.laws.test_compression import NARROW, SIZES
from tests.laws.worlds import DDP, Found, trained
from tests.strategies import LOSSES, Run, differences, runs


def heavy_loss(net: nn.Module, batch: Any) -> af.Loss:
    """Return a total that 16 bits cannot hold, as its weight, which they would round."""
    inputs, targets = batch
    total = (net(inputs) * targets).sum() * 4096
    return af.Loss(total, 4096.0 + len(inputs))


@attrs.frozen
class Heavy(Run):
    """A run with such a loss."""

    def program(self) -> Any:
        return attrs.evolve(super().program(), loss=heavy_loss)


@given(
    run=runs(dyadic=True, updates=1, kind="plain"),
    size=st.sampled_from([2, 4]),
    heavy=st.booleans(),
)
def test_what_16_bits_can_hold_is_exact(run: Run, size: int, *, heavy: bool) -> None:
    """On small integers the update is bitwise the plain one, whatever the weight is."""
    cls = Heavy if heavy else Run
    run = cls(**attrs.asdict(attrs.evolve(run, loss="mean"), recurse=False))
    expected = trained(size, run, DDP)
    found = trained(size, run, DDP, af.compress_grads("fp16"))
    for (one, _), (two, _) in zip(expected, found, strict=True):
        assert differences(one[-1], two[-1]) == []


@transform
class Scaled:
    """Make losses small, and scale them to where 16 bits begin to lose accuracy."""

    exponent: int

    def loss(self, loss_fn: Any, slot: Any, update: Any) -> Any:
        factor = 2.0 ** -(14 + self.exponent)

        def small(net: nn.Module, batch: Any) -> Any:
            returned = loss_fn(net, batch)
            if isinstance(returned, af.Loss):
                return af.Loss(returned.total * factor, returned.weight)
            return returned * factor

        return small, slot

    @property
    def tells(self) -> Mapping[str, Any]:
        return {"loss_scale": lambda _: torch.tensor(2.0**self.exponent)}


@given(
    run=runs(dyadic=False, updates=1, kind="plain"),
    size=SIZES,
    method=st.sampled_from(sorted(NARROW)),
    parts=st.integers(1, 3),
    scaled=st.none() | st.integers(0, 60),
)
def test_16_bits_round_each_rank_once_and_the_sum(run, size, method, parts, scaled):
    """Each element is within the roundings of its parts, and the same on all ranks.

    The smallest number of 16 bits is one beside the mean gradient, or beside the gradient as
    a scale has made it, however small the loss was.
    """
    setup = af.chain(
        DDP,
        af.compress_grads(method),
        af.accumulate(num_micro_batches=parts),
        None if scaled is None else Scaled(scaled),
    )

    def grads(world: af.World) -> tuple[Found, Found, float]:
        state = attrs.evolve(run, setup=setup).state(world)
        compute = af.value_and_grad(LOSSES[run.loss])
        batch = next(iter(af.batches(state)))
        _, own = compute(state, batch, sync=False)
        parts = {name: each.clone() for name, each in own.as_taken.items()}
        _, all_ = compute(state, batch)
        means = {n: each * size for n, each in all_.as_taken.items()}
        return parts, means, float(all_.weight)

    results = simulate(size, grads).results
    _, eps = NARROW[method]
    unit = 2 * results[0][2] if scaled is None else 1
    for name in results[0][1]:
        each = torch.stack([parts[name] for parts, _, _ in results])
        smallest = 2.0**-24 * size * unit  # of what fp16 can hold
        bound = each.abs().sum(0) * eps * (size + 1) + smallest
        for _, found, _ in results:
            assert torch.equal(found[name], results[0][1][name])
            assert bool(((found[name] - each.sum(0)).abs() <= bound).all())


class One(nn.Module):
    """A model whose gradient is its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return batch * self.weight


def stepped(world: af.World, loss: Any, batches: Any, *setup: Any) -> af.TrainState:
    """Return the state of such a model after a step of SGD on each of some values."""
    state = af.TrainState.create(
        model=One,
        optimizer=functools.partial(torch.optim.SGD, lr=1.0),
        setup=af.chain(af.wrap_ddp(), *setup),
        world=world,
    )
    step = af.make_step(loss)
    for each in batches:
        state, _ = step(state, each)
    return state


@given(
    mean=st.floats(2.0**-14, 60_000),
    rows=st.lists(st.integers(1, 500), min_size=2, max_size=4),
)
def test_a_total_overflows_no_sooner_than_its_mean(mean, rows):
    """A mean gradient that 16 bits can hold arrives, however many samples it is of."""

    def train(world: af.World) -> float:
        batch = torch.full((rows[world.rank],), mean)
        state = stepped(
            world, lambda net, x: net(x).mean(), [batch], af.compress_grads("fp16")
        )
        return -float(state.params["weight"])

    for found in simulate(len(rows), train):
        assert abs(found - mean) <= mean * 2**-10 * len(rows)
