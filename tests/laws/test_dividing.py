# SPDX-License-Identifier: Apache-2.0
"""Gradients are divided once, by the weight of all that was seen, as it is."""

import functools
from collections.abc import Mapping
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import accelfn as af
from accelfn.testing import simulate, strategies
from tests.internals import transform

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
dtypes = st.lists(st.sampled_from(DTYPES), min_size=1, max_size=3)


class Heads(nn.Module):
    """A parameter for each of some dtypes, whose gradient is a number of its batch."""

    def __init__(self, kinds: list[torch.dtype]) -> None:
        super().__init__()
        self.heads = nn.ParameterList(torch.zeros(2, dtype=kind) for kind in kinds)

    def forward(self, x: torch.Tensor, used: list[int]) -> torch.Tensor:
        return sum((self.heads[i].double() * x).sum() for i in used)


@transform
class Scaled:
    """Multiply losses by a power of 2."""

    scale: float

    @property
    def tells(self) -> Mapping[str, Any]:
        return {"loss_scale": lambda _: torch.tensor(self.scale)}


def create(world: af.World, kinds: list[torch.dtype], *setup: Any, **sgd: Any) -> Any:
    return af.TrainState.create(
        model=functools.partial(Heads, kinds),
        optimizer=functools.partial(torch.optim.SGD, lr=1.0, **sgd),
        setup=af.chain(*setup),
        world=world,
    )


@given(
    kinds=dtypes,
    weight=st.integers(1, 200_000) | st.integers(1, 999).map(lambda n: n / 7),
    size=st.sampled_from([1, 2]),
    as_tensor=st.booleans(),
    in_backward=st.booleans(),
    scale=st.sampled_from([None, 0.25, 8.0]),
    fused=st.booleans(),
)
def test_the_weight_is_not_rounded(
    kinds, weight, size, scale, as_tensor, in_backward, fused
):
    """Whatever the parameters' dtypes, a loss scale and the optimizer: the mean, once rounded."""
    scaled = None if scale is None else Scaled(scale)
    beside = af.optimizer_in_backward() if in_backward else scaled
    if fused:  # torch's kernel takes one dtype
        kinds = kinds[:1]
    total = 64.0  # a power of 2, which every dtype has
    wide = torch.float64 if isinstance(weight, float) else torch.int64
    each = torch.tensor(weight, dtype=wide) if as_tensor else weight

    def train(world: af.World) -> list[torch.Tensor]:
        state = create(world, kinds, af.wrap_ddp(), beside, fused=fused)
        every = list(range(len(kinds)))
        step = af.make_step(lambda net, x: af.Loss(net(x, every), each))
        state, _ = step(state, torch.full((), total, dtype=torch.float64))
        return [-param for param in state.params.values()]

    for found in simulate(size, train):
        for param, kind in zip(found, kinds, strict=True):
            expected = torch.full((2,), total / weight, dtype=torch.float64)
            eps = torch.finfo(kind).eps
            smallest = torch.finfo(kind).smallest_normal * eps
            error = (param.double() - expected).abs().max()
            assert float(error) <= 4 * (eps * total / weight + smallest)


@given(
    used=st.lists(st.sets(st.integers(0, 2), min_size=1), min_size=2, max_size=4),
    sums=strategies.sums(),
    divided=st.booleans(),
)
def test_sync_grads_gives_what_ddp_gives(used, sums, divided):
    """Parameters that took part on no rank have no gradient, so that nothing decays them.

    A rank may have divided its own before: they go by its weight all the same.
    """
    kinds = [torch.float64] * 3

    def train(world: af.World, *, by_hand: bool) -> list[torch.Tensor]:
        unused = af.wrap_ddp(find_unused_parameters=True)
        state = create(world, kinds, None if by_hand else unused, weight_decay=0.5)
        state = state.with_params({n: p + 1 for n, p in state.params.items()})
        x = torch.full((1,), 1.0 + world.rank, dtype=torch.float64)
        own, weight = sorted(used[world.rank]), 1 + world.rank
        compute = af.value_and_grad(lambda net, x: af.Loss(net(x, own), weight))
        _, grads = compute(state, x, sync=not by_hand)
        if by_hand and divided:
            grads.divide(None)
        grads = af.sync_grads(state, grads) if by_hand else grads
        return list(af.apply_grads(state, grads).params.values())

    found, expected = (
        simulate(
            len(used), functools.partial(train, by_hand=by_hand), sums=sums
        ).results
        for by_hand in (True, False)
    )
    for one, two in zip(found, expected, strict=True):
        for i, (a, b) in enumerate(zip(one, two, strict=True)):
            assert torch.allclose(a, b, rtol=1e-12, atol=0)
            assert bool((a == 1).all()) == (not any(i in each for each in used))


SETS = st.sets(st.integers(0, 2), min_size=1)


@st.composite
def uses(draw: st.DrawFn) -> list[list[list[set[int]]]]:
    """Draw which parameters take part, by update, rank and micro-batch."""
    ranks, micro = draw(st.integers(2, 3)), draw(st.integers(1, 2))
    rows = st.lists(SETS, min_size=micro, max_size=micro)
    update = st.lists(rows, min_size=ranks, max_size=ranks)
    return draw(st.lists(update, min_size=2, max_size=2))


@given(uses=uses(), keep_grads=st.sampled_from(["whole", "sharded"]))
def test_parts_that_are_unused_are_as_on_one_rank(uses, keep_grads):
    """What takes part on some ranks or in some micro-batches is trained; the rest stays."""
    kinds, ranks, micro = [torch.float64] * 3, len(uses[0]), len(uses[0][0])
    step = af.make_step(lambda net, batch: net(batch[0], sorted(batch[1])))

    def train(world: af.World, *setup: object) -> dict[str, torch.Tensor]:
        size = ranks if world.size == 1 else 1
        every = af.accumulate(num_micro_batches=micro * size)
        state = create(world, kinds, every, *setup, weight_decay=0.5)
        for update in uses:
            own = update if world.size == 1 else [update[world.rank]]
            x = torch.ones(1, dtype=torch.float64)
            state, _ = step(state, [(x, used) for rank in own for used in rank])
        return af.full_params(state, at="train")

    expected = train(af.World.single())
    split = af.wrap_fsdp(keep_grads=keep_grads, find_unused_parameters=True)
    for found in simulate(ranks, lambda world: train(world, split)):
        for name, param in expected.items():
            assert torch.allclose(found[name], param, rtol=1e-12, atol=0)
