# SPDX-License-Identifier: Apache-2.0
"""Updates that are skipped: by all ranks or by none, and as if their batch had not been.

A loss scale for 16 bits follows its rule, and changes no number.
"""

import functools
import math
from typing import Any

import attrs
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

import accelfn as af
from accelfn.errors import NonFiniteGradsError
from accelfn.testing import simulate
from tests.internals import Update, step, transform, tree
from tests.laws.worlds import DDP, Found
from tests.states import linear_state
from tests.strategies import differences, model, tensors

# steps take other values than the state's data
pytestmark = pytest.mark.filterwarnings("ignore::accelfn.errors.AccelfnWarning")

FP16 = af.autocast("fp16", init_scale=1024.0, growth_interval=2)
SKIP = af.skip_nonfinite()
SKIPPING = st.sampled_from([FP16, SKIP, af.chain(FP16, SKIP), af.chain(SKIP, FP16)])
NO_VIEWS = af.chain(af.shard_data(), af.wrap_ddp(gradient_as_bucket_view=False))
APART = af.chain(af.shard_data(), af.local_sgd(sync_every=2))
REDUCING = st.sampled_from([DDP, NO_VIEWS, APART])
AT_ONCE = [DDP, af.chain(DDP, af.clip_grad_norm(1.0))]
BAD = st.sampled_from([math.nan, math.inf, -math.inf])
SEEDS = st.integers(0, 5)


class Plant(torch.autograd.Function):
    """Add nothing to a loss, and one element to a gradient."""

    @staticmethod
    def forward(ctx: Any, param: Any, place: int, value: float) -> torch.Tensor:
        ctx.place, ctx.value, ctx.like = place, value, torch.zeros_like(param)
        return param.new_zeros(())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        del grad
        planted = ctx.like
        planted.view(-1)[ctx.place % planted.numel()] = ctx.value
        return planted, None, None


@attrs.frozen
class Fault:
    """An element of a gradient that is not finite: where, on which rank, in which batches."""

    value: float
    rank: int
    param: int
    place: int
    at: frozenset[int]


FAULTS = st.builds(
    Fault,
    BAD,
    st.integers(0, 3),
    st.integers(0, 3),
    st.integers(0, 8),
    st.frozensets(st.integers(0, 4), min_size=1, max_size=3),
)


NONE = Fault(0.0, 0, 0, 0, frozenset())


def batches(seed: int, count: int = 5) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return batches of plain values, on all ranks alike."""
    generator = torch.Generator().manual_seed(seed)
    draw = functools.partial(torch.randn, dtype=torch.float64, generator=generator)
    return [(draw(4, 3), draw(4, 2)) for _ in range(count)]


def create(world: af.World, *setup: object) -> af.TrainState:
    return linear_state(
        model=model("norm"),
        optimizer=functools.partial(torch.optim.AdamW, lr=0.25),
        schedule=af.schedules.linear(16),
        setup=af.chain(*setup),
        world=world,
    )


def loss_times(net: nn.Module, batch: Any) -> torch.Tensor:
    """Return a loss that may be no number."""
    (x, y), factor = batch
    return (net(x) - y).square().mean() * factor


def train(
    world: af.World,
    setup: af.chain,
    seed: int,
    fault: Fault,
    *,
    leave_out: bool = False,
) -> tuple[list[Found], list[float], int]:
    """Train on five batches; return states, which were skipped, and how many the state says."""

    def loss_fn(net: nn.Module, batch: Any) -> torch.Tensor:
        values, bad = batch
        loss = loss_times(net, (values, 1.0))
        if bad and world.rank == fault.rank % world.size:
            param = list(net.parameters())[fault.param % 4]
            loss = loss + Plant.apply(param, fault.place, fault.value)
        return loss

    state, step = create(world, setup), af.make_step(loss_fn)
    states, skipped = [tensors(state)], []
    for i, values in enumerate(batches(seed)):
        if leave_out and i in fault.at:
            continue
        state, metrics = step(state, (values, i in fault.at))
        states.append(tensors(state))
        skipped.append(float(metrics["skipped"]) if "skipped" in metrics else 0.0)
    return states, skipped, state.num_skipped


def trained_parts(found: Found) -> Found:
    """Return what training is about: not what counts skips, nor the running scale."""
    apart = ("num_skipped", "slots.autocast", "slots.skip_nonfinite")
    return {path: found[path] for path in found if not path.startswith(apart)}


@transform
class Notes:
    """Count the updates whose gradients it sees."""

    def init(self, state: af.TrainState) -> dict[str, int]:
        return {"seen": 0}

    def grads(self, grads: af.Grads, slot: Any, update: Update) -> Any:
        return grads, {"seen": slot["seen"] + 1}


@given(
    fault=FAULTS,
    skipping=SKIPPING,
    reducing=REDUCING,
    size=st.integers(1, 3),
    seed=SEEDS,
)
@example(
    fault=Fault(math.nan, 0, 0, 0, frozenset({1})),
    skipping=SKIP,
    reducing=APART,
    size=2,
    seed=0,
)
def test_one_bad_element_on_one_rank_skips_that_update_on_all(
    fault, skipping, reducing, size, seed
):
    """All that is trained stays, bitwise, and training on is as if the batch had not been."""
    setup = af.chain(reducing, Notes(), skipping, af.clip_grad_norm(1.0), af.ema(0.5))
    # a power of 2 in the place of another changes no bit of a gradient in float64
    with_bad, without = (
        simulate(size, lambda w, out=out: train(w, setup, seed, fault, leave_out=out))
        for out in (False, True)
    )
    for (states, skipped, count), (good, *_) in zip(with_bad, without, strict=True):
        assert skipped == [float(i in fault.at) for i in range(5)]
        assert count == len(fault.at)
        for i in fault.at:
            before, after = map(trained_parts, states[i : i + 2])
            assert differences(before, after) == []
        last, expected = (trained_parts(each[-1]) for each in (states, good))
        assert differences(last, expected) == []


@transform
class Wishes:
    """Skip on one rank, or on all as they know of one another, at some updates."""

    rank: int | None = 0
    at: tuple[int, ...] = ()
    flag: Any = True

    def grads(self, grads: af.Grads, slot: Any, update: Update) -> Any:
        mine = self.rank in (None, update.world.rank) and update.num_tried in self.at
        flag = self.flag if mine else self.flag * 0 == 1
        return grads.with_skip(flag, agreed=self.rank is None), slot


@given(
    size=st.integers(1, 3),
    wishes=st.lists(
        st.tuples(
            st.sampled_from([None, 0, 1, 2]),
            st.frozensets(st.integers(0, 4), max_size=2),
            st.sampled_from([True, 2, -1, 0.5, math.nan, torch.tensor(3)]),
        ),
        max_size=3,
    ),
    reducing=REDUCING,
)
def test_any_wish_of_any_rank_skips_once(size, wishes, reducing):
    """Wishes of transforms and ranks, agreed or not, are joined by or; an update counts once."""
    wishing = [
        Wishes(rank and rank % size, at=tuple(sorted(at)), flag=flag, name=f"wish_{i}")
        for i, (rank, at, flag) in enumerate(wishes)
    ]
    skip = frozenset().union(*(at for _, at, _ in wishes))
    setup = af.chain(reducing, *wishing)
    for _, skipped, count in simulate(
        size, lambda world: train(world, setup, 0, NONE)
    ).results:
        assert skipped == [float(i in skip) for i in range(5)]
        assert count == len(skip)


@given(
    value=BAD,
    shapes=st.lists(st.sampled_from([(1,), (3,), (2, 5), (4, 4, 4)]), max_size=4),
    dtype=st.sampled_from(
        [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64]
    ),
    place=st.integers(0, 1000),
    spoil=st.booleans(),
)
@example(value=math.nan, shapes=[(3,)], dtype=torch.complex64, place=1, spoil=True)
def test_what_is_not_finite_is_found(value, shapes, dtype, place, spoil):
    """Any element of any tensor is seen, the largest finite one is not, and all stay as is."""
    fixed = [torch.full(shape, -0.0).to(dtype) for shape in shapes]
    largest = torch.finfo(dtype).max
    for tensor in fixed:
        tensor.view(-1)[0] = largest
        tensor.view(-1)[-1] = torch.finfo(dtype).tiny
    if spoil and fixed:
        tensor = fixed[place % len(fixed)]
        number = complex(0.0, value) if dtype.is_complex else value
        tensor.view(-1)[place % tensor.numel()] = number
    before = [tensor.clone() for tensor in fixed]
    assert bool(tree.non_finite(fixed)) == (spoil and bool(fixed))
    for one, two in zip(before, fixed, strict=True):
        number = ~one.isnan()
        assert torch.equal(number, ~two.isnan())
        assert torch.equal(one[number].view(torch.uint8), two[number].view(torch.uint8))


@given(
    most=st.integers(0, 3),
    size=st.integers(1, 3),
    rank=st.integers(0, 2),
    parts=st.integers(1, 3),
)
def test_too_many_in_a_row_raise_on_every_rank(most, size, rank, parts):
    """The update after `max_consecutive` raises, names parameter and rank, and is not taken."""

    def run(world: af.World) -> None:
        accumulate = af.accumulate(num_micro_batches=parts)
        setup = af.chain(DDP, accumulate, af.skip_nonfinite(max_consecutive=most))
        state, step = create(world, setup), af.make_step(loss_times)
        good = [(batches(0, 1)[0], 1.0)] * parts
        factor = math.nan if world.rank == rank % size else 1.0
        bad = [(good[0][0], factor), *good[1:]]  # in the first micro-batch alone
        for i in range(2):  # a good update begins the count anew
            state, _ = step(state, good)
            for _ in range(most):
                state, _ = step(state, bad)
            assert (state.step, state.num_skipped) == (i + 1, most * (i + 1))
        before = tensors(state)
        with pytest.raises(NonFiniteGradsError) as caught:
            step(state, bad)
        said = str(caught.value)
        assert f"{most + 1} updates in a row" in said
        assert "first.weight" in said
        for each in range(size):
            row = next(r for r in said.splitlines() if r.startswith(f"  rank {each}:"))
            assert ("its loss is not finite" in row) == (each == rank % size)
        assert differences(before, tensors(state)) == []

    simulate(size, run)


@given(
    overflows=st.lists(st.booleans(), min_size=1, max_size=8),
    kind=st.sampled_from([torch.optim.AdamW, torch.optim.SGD]),
    scheduled=st.booleans(),
    setup=st.sampled_from([*AT_ONCE, af.chain(DDP, af.ema(0.5)), APART]),
    net=st.sampled_from(["plain", "norm"]),
    who=st.sampled_from([(FP16,), (SKIP,), (FP16, SKIP)]),
    size=st.integers(1, 2),
)
def test_a_device_that_skips_by_itself_does_as_the_host(
    overflows, kind, scheduled, setup, net, who, size
):
    """States, rates and counts are bitwise the same, and the last flag is not read before.

    A state is that of the optimizer, of batch statistics, of averages, and of who counts skips in
    a row.
    """

    def run(world: af.World) -> Any:
        state = linear_state(
            model=model(net),
            optimizer=functools.partial(kind, lr=0.25, fused=True),
            schedule=af.schedules.linear(16) if scheduled else None,
            setup=af.chain(setup, *who),
            world=world,
        )
        step = af.make_step(loss_times)
        # one update first, so that the optimizer's state is there
        state, _ = step(state, (batches(0, 1)[0], 1.0))
        skipped = []
        for bad in overflows:
            factor = math.inf if bad else 1.0
            state, metrics = step(state, (batches(0, 1)[0], factor))
            skipped.append(float(metrics["skipped"]))
        waiting = state.skips is not None and state.skips._known is None
        counts = (state.step, state.num_skipped, state.num_tried, state.lrs)
        return tensors(state), skipped, counts, waiting

    host = simulate(size, run).results
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step, "_reads_at_once", lambda _: False)
        device = simulate(size, run).results
    for one, two in zip(host, device, strict=True):
        assert differences(one[0], two[0]) == []
        assert one[1:3] == two[1:3]
        assert (one[3], two[3]) == (False, setup in AT_ONCE)  # averages read it


class OverflowsIn(torch.autograd.Function):
    """Leaves a model's output as it is, and gives one column of it an infinite gradient."""

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, column: int | None) -> torch.Tensor:
        ctx.column = column
        return out.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        grad = grad.clone()
        if ctx.column is not None:
            grad[:, ctx.column] = math.inf
        return grad, None


@given(
    columns=st.lists(st.none() | st.integers(0, 4), min_size=1, max_size=5),
    rank=st.integers(0, 3),
    who=SKIPPING,
    split=st.sampled_from([af.wrap_fsdp(), af.wrap_ddp()]),
    micro=st.integers(1, 2),
    size=st.integers(2, 4),
)
def test_an_overflow_in_rows_of_one_rank_skips_the_update_of_all(
    columns, rank, who, split, micro, size
):
    """Under wrap_fsdp one rank alone has the rows that are not finite; its loss is finite."""

    def run(world: af.World) -> None:
        state = linear_state(
            *(2, 5),
            data=af.Data(torch.ones(16, 2), global_batch_size=8),
            setup=af.chain(
                af.accumulate(num_micro_batches=micro), af.shard_data(), split, who
            ),
            world=world,
        )

        def loss_fn(module: nn.Module, batch: Any, column: int | None) -> torch.Tensor:
            own = column if world.rank == rank % size else None
            return OverflowsIn.apply(module(batch), own).square().mean()

        step, taken = af.make_step(loss_fn), 0
        for column, batch in zip(columns, af.batches(state), strict=False):
            before = af.full_params(state, at="eval")
            state, _ = step(state, batch, column)
            after = af.full_params(state, at="eval")
            taken += column is None
            assert (state.step, state.num_skipped) == (taken, state.num_tried - taken)
            same = all(torch.equal(before[name], after[name]) for name in before)
            assert same == (column is not None)
            assert all(bool(each.isfinite().all()) for each in after.values())

    simulate(size, run)


# Scales of losses


@given(
    overflows=st.lists(st.booleans(), max_size=12),
    growth=st.sampled_from([2.0, 4.0]),
    backoff=st.sampled_from([0.5, 0.25]),
    interval=st.integers(1, 3),
    size=st.integers(1, 2),
)
def test_the_scale_follows_its_rule(overflows, growth, backoff, interval, size):
    """It shrinks at an overflow, grows after so many good updates; the rate follows the step."""
    fp16 = af.autocast(
        "fp16",
        init_scale=2.0**10,
        growth_factor=growth,
        backoff_factor=backoff,
        growth_interval=interval,
    )

    def run(world: af.World) -> None:
        state, step = create(world, DDP, fp16), af.make_step(loss_times)
        scale, good, taken = 2.0**10, 0, 0
        for bad in overflows:
            assert state.lrs == (0.25 * af.schedules.linear(16)(taken),)
            factor = math.inf if bad else 1.0
            state, metrics = step(state, (batches(0, 1)[0], factor))
            assert float(metrics["loss_scale"]) == scale
            good = 0 if bad else good + 1
            taken += not bad
            if bad:
                scale *= backoff
            elif good == interval:
                scale, good = scale * growth, 0
            assert float(state.slots["autocast"]["scale"]) == scale
            assert int(state.slots["autocast"]["good"]) == good
            assert (state.step, state.num_skipped) == (taken, state.num_tried - taken)

    simulate(size, run)


def test_a_loss_that_is_a_total_needs_no_smaller_scale():
    """A sum over 4,096 rows overflows no sooner than their mean, and skips nothing."""
    generator, rows = torch.Generator().manual_seed(0), 4096
    x, y = (torch.randn(rows * 3, n, generator=generator) for n in (8, 4))
    state = linear_state(
        *(8, 4),
        data=af.Data((x, y), global_batch_size=rows),
        setup=af.autocast("fp16", init_scale=2.0**14),
    )

    def total(net: nn.Module, batch: Any) -> af.Loss:
        x, y = batch
        return af.Loss((net(x).float() - y).square().mean(1).sum(), len(x))

    step = af.make_step(total)
    for batch in af.batches(state, until_epoch=1):
        state, _ = step(state, batch)
    assert state.num_skipped == 0
