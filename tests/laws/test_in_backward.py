# SPDX-License-Identifier: Apache-2.0
"""optimizer_in_backward: the plain update, with gradients that are never all there."""

import functools
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import accelfn as af
from accelfn.testing import simulate
from accelfn.testing.strategies import Program
from tests.laws.worlds import DDP, alone, single, trained
from tests.strategies import LOSSES, OPTIMIZERS, Run, differences, runs, tensors

IN_BACKWARD = af.optimizer_in_backward()
DDP_ALONE = (af.shard_data(), af.wrap_ddp())
KINDS = st.sampled_from(["plain", "tied", "frozen", "unused", "norm", "dropout"])


class Counting(torch.optim.SGD):
    """Plain SGD whose rate falls by a number that its step counts, in the group."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            group["lr"] = group["lr"] / (1 + group["k"])


class Coupled(torch.optim.SGD):
    """SGD on gradients that are divided by the norm of all."""

    def step(self, closure: Any = None) -> None:
        (group,) = self.param_groups
        found = [p.grad for p in group["params"] if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(found)
        for grad in found:
            grad.div_(norm)
        super().step(closure)


def is_head(name: str, param: torch.Tensor) -> bool:
    del param
    return name.startswith("head")


def with_empty_groups(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Return an optimizer whose first and last groups have no parameters, and count."""
    params = [param for _, param in named]
    groups = [{"params": each} for each in ([], params[:1], params[1:], [])]
    return Counting(groups, lr=0.25)


MORE: dict[str, Any] = {
    "fused": functools.partial(torch.optim.AdamW, lr=0.05, fused=True),
    "foreach": functools.partial(torch.optim.Adam, lr=0.05, foreach=True),
    "counting": functools.partial(Counting, lr=0.25),
    "empty groups": with_empty_groups,
    "parts": af.combine_optimizers(
        (is_head, functools.partial(torch.optim.SGD, lr=0.25, momentum=0.5)),
        (..., OPTIMIZERS["adamw"]),
    ),
}


@attrs.frozen
class Other(Run):
    """A run with more kinds of optimizers."""

    def program(self) -> Program:
        known = {**OPTIMIZERS, **MORE}
        plain = attrs.evolve(self, optimizer="sgd")
        program = Run(**attrs.asdict(plain, recurse=False)).program()
        return attrs.evolve(program, optimizer=known[self.optimizer])


@st.composite
def others(draw: st.DrawFn, kinds: Any = None, **fixed: Any) -> Other:
    kind = draw(KINDS if kinds is None else kinds)
    run = draw(runs(kind=kind, **fixed))
    drawn = st.sampled_from(sorted({*OPTIMIZERS, *MORE}))
    if kind == "frozen":  # it leaves one part without parameters
        drawn = drawn.filter(lambda name: name != "parts")
    optimizer = draw(drawn)
    run = attrs.evolve(run, optimizer=optimizer)
    if kind == "norm":  # two samples in every share
        run = attrs.evolve(run, n=16, batch_size=8)
    return Other(**attrs.asdict(run, recurse=False))


@given(run=others(), averaging=st.booleans())
def test_it_is_the_plain_update(run: Other, *, averaging: bool) -> None:
    """Parameters, optimizer, buffers, averages and metrics are the same, bitwise."""
    beside = af.ema(0.5) if averaging else None
    states, means = alone(run, beside)
    found, told = alone(run, beside, IN_BACKWARD)
    assert told == means
    for one, two in zip(states, found, strict=True):
        assert differences(one, two) == []


@given(
    run=others(KINDS.filter(lambda kind: kind != "unused")),
    size=st.integers(2, 4),
    bucket=st.sampled_from([None, 1e-5]),
    views=st.booleans(),
    beside=st.sampled_from(
        [
            None,
            af.compress_grads("fp16"),
            af.compress_grads("powersgd", start_powerSGD_iter=1),
        ]
    ),
)
def test_over_ranks_it_is_the_plain_update(run, size, bucket, beside, *, views):
    """However gradients lie in buckets; bitwise where the weight is added up in one order."""
    ddp = af.wrap_ddp(bucket_cap_mb=bucket, gradient_as_bucket_view=views)
    exact = size == 2 or beside is not None
    run = attrs.evolve(run, updates=1) if not exact else run
    expected = trained(size, run, af.shard_data(), ddp, beside)
    found = trained(size, run, af.shard_data(), ddp, beside, IN_BACKWARD)
    for (one, _), (two, _) in zip(expected, found, strict=True):
        within = 0.0 if exact else 1e-6
        assert differences(one[-1], two[-1], within=within) == []


class Deep(nn.Sequential):
    """Layers of equal size, one of them used twice."""

    def __init__(self, depth: int, width: int, *, tied: bool) -> None:
        super().__init__(*(nn.Linear(width, width) for _ in range(depth)))
        if tied:
            self[depth - 1].weight = self[depth - 2].weight


@given(
    depth=st.integers(3, 6),
    width=st.sampled_from([2, 8]),
    tied=st.booleans(),
    summed=st.booleans(),
)
def test_gradients_are_never_all_there(depth, width, *, tied, summed):
    """Whenever a gradient arrives, at most those of two layers are alive."""
    state = af.TrainState.create(
        model=lambda: Deep(depth, width, tied=tied),
        optimizer=functools.partial(torch.optim.AdamW, lr=0.05),
        setup=IN_BACKWARD,
        world=single(),
    )
    peak = []

    def watch(net: nn.Module) -> None:
        params = list(net.parameters())

        def arrived(grad: torch.Tensor) -> None:
            alive = [p.grad for p in params if p.grad is not None]
            peak.append(sum(each.nbytes for each in [grad, *alive]))

        for param in params:
            param.register_hook(arrived)

    def loss_fn(net: nn.Module, batch: torch.Tensor) -> Any:
        if not peak:
            watch(net)
        total = net(batch).square().sum()
        return af.Loss(total, 3.0) if summed else total

    step = af.make_step(loss_fn)
    for _ in range(2):
        state, _ = step(state, torch.ones(4, width))
    layer = 4 * (width * width + width)
    assert len(peak) >= 2 * (2 * depth - tied)
    assert max(peak) <= 2 * layer


class Breaks(torch.autograd.Function):
    """Pass a tensor on, and raise in the backward pass."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        del ctx
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        del ctx, grads
        raise KeyError("planned")


@given(run=runs(kind="plain", dyadic=False), late=st.booleans())
def test_a_broken_backward_pass_ends_the_state(run: Run, *, late: bool) -> None:
    """Once a parameter was stepped the state is over, and says so; before, it is whole."""
    state = attrs.evolve(run, setup=IN_BACKWARD).state()

    def loss_fn(net: Any, batch: Any) -> torch.Tensor:
        hidden = net.first(batch[0])
        hidden = Breaks.apply(hidden) if late else hidden
        out = net.head(hidden).square().mean()
        return out if late else Breaks.apply(out)

    kept = tensors(state)
    batch = next(iter(af.batches(state)))
    with pytest.raises(KeyError):
        af.make_step(loss_fn)(state, batch)
    if late:
        with pytest.raises(af.errors.StateDonatedError, match="partly updated"):
            _ = state.params
        return
    assert differences(kept, tensors(state)) == []
    after, _ = af.make_step(LOSSES["squared"])(state, batch)
    plain = attrs.evolve(run, setup=af.chain()).state()
    expected, _ = af.make_step(LOSSES["squared"])(plain, next(iter(af.batches(plain))))
    assert differences(tensors(expected), tensors(after)) == []


@given(rate=st.sampled_from([0.5, 0.125]))
def test_an_optimizer_that_couples_parameters_is_refused(rate: float) -> None:
    """It is tried when the state is created, which names it and what came out otherwise."""
    with pytest.raises(af.errors.OptimizerError, match=r"(?s)Coupled.*one by one"):
        af.TrainState.create(
            model=lambda: nn.Linear(8, 8),
            optimizer=functools.partial(Coupled, lr=rate),
            setup=IN_BACKWARD,
            world=single(),
        )


@given(
    run=runs(kind="plain"),
    size=st.integers(1, 2),
    failed=st.sampled_from([None, "batch", "loss", "extras"]),
)
def test_gradients_by_themselves_are_refused(run, size, failed):
    """value_and_grad says what to call instead, also after a step that raised."""

    def loss_fn(model: nn.Module, batch: object, *extras: object) -> object:
        found = LOSSES[run.loss](model, batch)
        if extras:
            raise ZeroDivisionError
        return found

    def take(world: af.World) -> None:
        state = attrs.evolve(run, setup=af.chain(DDP, IN_BACKWARD)).state(world)
        first = next(iter(af.batches(state)))
        before, step = tensors(state), af.make_step(loss_fn)
        if failed == "batch":
            later = next(iter(af.batches(af.seek(state, 0, epoch=1))))
            with pytest.raises(af.errors.BatchError, match="epoch 1"):
                step(state, later)
        elif failed == "loss":
            with pytest.raises(ZeroDivisionError):
                step(state, first, "extra")
        elif failed == "extras":
            with pytest.raises(af.errors.LossError):
                af.make_step(LOSSES[run.loss])(state, first, "extra")
        with pytest.raises(af.errors.GradsError, match="make_step"):
            af.value_and_grad(loss_fn)(state, first)
        assert differences(before, tensors(state)) == []
        run.train(state, 1)

    simulate(size, take)
