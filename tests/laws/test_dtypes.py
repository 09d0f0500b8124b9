# SPDX-License-Identifier: Apache-2.0
"""Parameters of any dtype and shape, under every transform: its number, or an error."""

import functools
import math

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import accelfn as af
from accelfn.testing import simulate
from tests.catalog import CATALOG, NOT_DRAWN, public_transforms
from tests.internals import Update
from tests.laws.worlds import single

ALL = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex64, torch.complex128),
)
SHAPES = [(), (1,), (3,), (2, 3), (4, 4), (0,), (0, 2)]
DDP = af.chain(af.shard_data(), af.wrap_ddp())
ROWS = {
    "identity": af.chain(DDP, af.identity()),
    "wrap_ddp": DDP,
    "wrap_ddp, no views": af.chain(
        af.shard_data(), af.wrap_ddp(gradient_as_bucket_view=False)
    ),
    "autocast": af.chain(af.autocast("bf16"), DDP),
    "autocast, fp16": af.chain(af.autocast("fp16", init_scale=8.0), DDP),
    "clip_grad_norm": af.chain(DDP, af.clip_grad_norm(0.25)),
    "clip_grad_norm, groups": af.chain(DDP, af.clip_grad_norm(0.25, per_group=True)),
    "clip_grad_norm, largest": af.chain(
        DDP, af.clip_grad_norm(0.25, norm_type=float("inf"), per_group=True)
    ),
    "clip_grad_value": af.chain(DDP, af.clip_grad_value(0.125)),
    "local_sgd": af.chain(
        af.shard_data(), af.local_sgd(sync_every=1, buffers=True, opt_state=True)
    ),
    "diloco": af.chain(af.shard_data(), af.diloco(sync_every=1)),
    "skip_nonfinite, apart": af.chain(af.local_sgd(sync_every=2), af.skip_nonfinite()),
    "check_replicas": af.chain(DDP, af.check_replicas(every=1)),
    "ema": af.chain(DDP, af.ema(0.5)),
    "ema, slow": af.chain(DDP, af.ema(0.998)),
    "context_parallel, ring": af.chain(DDP, af.context_parallel(ring=True)),
    "compress, fp16": af.chain(DDP, af.compress_grads("fp16")),
    "compress, bf16": af.chain(DDP, af.compress_grads("bf16")),
    "compress, powersgd": af.chain(
        DDP,
        af.compress_grads(
            "powersgd",
            matrix_approximation_rank=4,
            start_powerSGD_iter=0,
            min_compression_rate=0,
        ),
    ),
    "optimizer_in_backward": af.chain(DDP, af.optimizer_in_backward()),
}
ELSEWHERE = {
    af.wrap_deepspeed: "float32 alone, on real processes: tests/ranks/test_zero.py",
    af.compile: "seconds a compilation",
    af.schedule_free: "another optimizer",
    af.tensor_parallel: "layers of a plan: tests/laws/test_tensor_parallel.py",
    af.wrap_fsdp: "a unit is of one dtype: tests/unit/test_wrap_fsdp.py",
}
NAMED = {type(each) for row in ROWS.values() for each in af.chain(row)}
ROWS |= {
    each.name: af.chain(DDP, each.transform)
    for each in CATALOG
    if type(each.transform) not in NAMED | ELSEWHERE.keys() | NOT_DRAWN
}
ACROSS = (
    *(af.shard_data, af.wrap_ddp, af.compress_grads, af.local_sgd, af.check_replicas),
    *(af.sync_batchnorm, af.accumulate, af.context_parallel),
)
"""Transforms that leave a world of one, and a whole batch, as they are."""


@attrs.frozen
class Odd:
    """A parameter."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    trained: bool = True


odds = st.builds(
    Odd,
    st.sampled_from(ALL),
    st.sampled_from(SHAPES),
    st.sampled_from([True, True, False]),
)
several = st.lists(odds, min_size=1, max_size=6).filter(
    lambda found: any(each.trained for each in found)
)


class Numbers(nn.Module):
    """Parameters that are drawn; or the same numbers in 64 bits, perhaps as real ones."""

    def __init__(self, found: list[Odd], *, real: bool | None) -> None:
        super().__init__()
        self.held = nn.ParameterList()
        for i, each in enumerate(found):
            start = torch.arange(torch.Size(each.shape).numel()).double() % 3 - i / 4
            start = start.reshape(each.shape)
            if each.dtype.is_complex:
                start = torch.complex(start, 1 - start)
            value = start.to(each.dtype) if real is None else start
            value = _as_real(value) if real else value
            self.held.append(nn.Parameter(value, each.trained))
        self.inner = nn.Linear(1, 1).double().requires_grad_(requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = (_as_real(param) for param in self.held)
        away = torch.stack([(each - 0.5).square().sum() for each in wide]).sum()
        with torch.autocast("cpu", enabled=False):
            return away * (x + self.inner(x[:, None]).squeeze(1) * 0)


def _as_real(tensor: torch.Tensor) -> torch.Tensor:
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.double()


def grouped(named: list) -> torch.optim.Optimizer:
    """Give every other one another group."""
    groups = [{"params": [p for _, p in named[i::2]]} for i in range(2)]
    return torch.optim.SGD([g for g in groups if g["params"]], lr=0.25, momentum=0.5)


X = torch.tensor([0.25, 0.5, 1.0, 0.25]).double()


def trained(
    world: af.World, found: list[Odd], setup: af.chain, *, real: bool | None = None
) -> list[dict[str, torch.Tensor]]:
    """Return parameters, and those to evaluate, after three updates, as real numbers."""
    state = af.TrainState.create(
        model=functools.partial(Numbers, found, real=real),
        optimizer=grouped,
        data=af.Data(X, global_batch_size=4),
        setup=setup,
        world=world,
    )
    step = af.make_step(lambda net, x: net(x).mean())
    for batch in af.batches(state, until_epoch=3):
        state, _ = step(state, batch)
    return [
        {n: _as_real(p) for n, p in params.items() if n.startswith("held")}
        for params in (state.params, af.eval_params(state))
    ]


def test_every_transform_has_a_row():
    """Every public transform is here, or says why not."""
    there = {type(each) for row in ROWS.values() for each in af.chain(row)}
    assert public_transforms() | NOT_DRAWN == there | ELSEWHERE.keys()


def refused(row: str, each: Odd) -> bool:
    """Whether a transform says of a parameter that it is not for such."""
    if row == "autocast, fp16":
        return each.dtype is torch.float16
    return row == "clip_grad_value" and each.trained and each.dtype.is_complex


def precision(row: str, each: Odd, found: list[Odd]) -> float:
    """Return the unit of rounding in what a transform makes of a parameter."""
    sent = {"compress, bf16": torch.bfloat16, "compress, fp16": torch.float16}
    # a norm is no better than the gradients that it is of
    beside = found if row.startswith("clip_grad_norm") else [each]
    dtypes = [*(other.dtype for other in beside), sent.get(row, each.dtype)]
    return max(torch.finfo(dtype).eps for dtype in dtypes)


@pytest.mark.filterwarnings(
    "ignore::accelfn.errors.AccelfnWarning"
)  # ranks apart do the same
@pytest.mark.parametrize("row", ROWS)
@given(found=several, size=st.integers(1, 2))
def test_any_dtype_and_shape(row: str, found: list[Odd], size: int) -> None:
    """It is what float64 gives, up to rounding in the parameter's dtype, or is refused."""
    matrix = Odd(torch.complex64, (4, 4))
    found = found if refused(row, matrix) else [*found, matrix]
    setup = af.chain(ROWS[row])
    alone = af.chain(*(each for each in setup if not isinstance(each, ACROSS)))

    def train(world: af.World) -> list[dict[str, torch.Tensor]]:
        return trained(world, found, setup)

    if any(refused(row, each) for each in found):
        with pytest.raises(af.errors.Error, match=r"held\.\d"):
            simulate(size, train)
        return
    expected = trained(single(), found, alone, real="largest" not in row)
    for per_rank in simulate(size, train):
        for one, two in zip(per_rank, expected, strict=True):
            for i, each in enumerate(found):
                have, want = one[f"held.{i}"], two[f"held.{i}"]
                assert have.shape == want.shape
                largest = float(want.abs().max()) if want.numel() else 0.0
                unit = precision(row, each, found) * max(1.0, largest)
                assert bool(((have - want).abs() <= 8 * unit).all())


@given(
    dtype=st.sampled_from(ALL),
    decay=st.sampled_from([0.5, 0.999, 0.9995]),
    updates=st.integers(40, 80),
)
def test_an_average_moves_in_any_dtype(dtype, decay, updates):
    """However little of a parameter an update adds to the average: in 16 bits none is lost."""
    ema, start = af.ema(decay), torch.ones(2, dtype=dtype)
    state = af.TrainState.create(
        model=lambda: nn.ParameterList([start]),
        optimizer=functools.partial(torch.optim.SGD, lr=1.0),
        setup=ema,
        world=single(),
    )
    state, slot = state.with_params({"0": start * 0}), state.slots["ema"]
    for _ in range(updates):
        update = Update(state=state, slots={"ema": slot})
        state, slot = ema.after_update(state, slot, update)
    update = Update(state=state, slots={"ema": slot})
    found = ema.eval_params(state.params, slot, update)[0]["0"]
    assert found.dtype is dtype
    wide = torch.complex128 if dtype.is_complex else torch.float64
    expected = _as_real(torch.full((2,), decay**updates, dtype=wide))
    error = float((_as_real(found) - expected).abs().max())
    eps = torch.finfo(dtype).eps
    assert error <= (eps if dtype.itemsize < 4 else 128 * eps)


@given(
    dtypes=st.lists(st.sampled_from(ALL[:4]), min_size=1, max_size=3),
    rows=st.integers(0, 40),
    norm_type=st.sampled_from([1.0, 2.0, 3.0, float("inf")]),
)
def test_a_norm_is_not_kept_in_16_bits(dtypes, rows, norm_type):
    """Gradients that float16 holds, and their norm it does not, are clipped; none has norm 0."""
    state = af.TrainState.create(
        model=lambda: nn.ParameterList([torch.zeros(rows, dtype=d) for d in dtypes]),
        optimizer=functools.partial(torch.optim.SGD, lr=1.0),
        world=single(),
    )
    _, grads = af.value_and_grad(lambda net, _: sum(p.double().sum() for p in net))(
        state, None
    )
    clip = af.clip_grad_norm(2.0, norm_type=norm_type)
    grads = grads.map(lambda g: g * 24576)
    update = Update(state=state, slots=dict(state.slots), grads=grads)
    clipped, _ = clip.grads(grads, None, update)
    norm = (
        torch.full((rows * len(dtypes),), 24576.0).double().norm(norm_type)
        if rows
        else 0.0
    )
    assert math.isclose(float(clipped.metrics["grad_norm"]), norm, rel_tol=1e-6)
    for name, grad in clipped.tensors.items():
        unit = 2.0 * (torch.finfo(dtypes[int(name)]).eps + 1e-6)
        assert (
            not rows or float((grad.double() - 2.0 * 24576 / norm).abs().max()) <= unit
        )


@given(
    dtype=st.sampled_from(ALL),
    weights=st.lists(
        st.sampled_from([1, 257, 70_000, 2**24 + 1]), min_size=2, max_size=3
    ),
)
def test_ranks_are_averaged_by_any_weight(dtype, weights):
    """A weight that a parameter's dtype cannot hold counts as it is."""

    def train(world: af.World) -> torch.Tensor:
        state = af.TrainState.create(
            model=lambda: nn.ParameterList([torch.zeros(2, dtype=dtype)]),
            optimizer=functools.partial(torch.optim.SGD, lr=1.0),
            setup=af.local_sgd(sync_every=1),
            world=world,
        )
        weight = weights[world.rank]
        slope = -world.rank * weight / 1024  # a total that float16 can hold
        step = af.make_step(
            lambda net, _: af.Loss((_as_real(net[0]) * slope).sum(), weight)
        )
        # of a complex number, both parts have this gradient
        state, _ = step(state, None)
        return _as_real(state.params["0"])

    mean = sum(rank * w for rank, w in enumerate(weights)) / sum(weights)
    for found in simulate(len(weights), train):
        unit = 4 * torch.finfo(dtype).eps * len(weights)
        assert float((found * 1024 - mean).abs().max()) <= unit
