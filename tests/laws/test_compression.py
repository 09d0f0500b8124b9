# SPDX-License-Identifier: Apache-2.0
"""compress: fewer bytes, and the mean over all ranks' samples still."""

import functools
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import accelfn as af
from accelfn.testing import simulate
from tests.internals import transform
from tests.laws.worlds import DDP, Found, trained, without_slots
from tests.strategies import IN, LOSSES, Run, differences, runs, tensors

NARROW = {"fp16": (torch.float16, 2.0**-11), "bf16": (torch.bfloat16, 2.0**-8)}
SIZES = st.integers(2, 4)
BUCKETS = st.sampled_from([None, 1e-5])


def low_rank(rank: int = 1, start: int = 0) -> Any:
    """Return PowerSGD that compresses every matrix."""
    return af.compress_grads(
        "powersgd",
        matrix_approximation_rank=rank,
        start_powerSGD_iter=start,
        min_compression_rate=0,
    )


@given(weights=st.lists(st.sampled_from([0.0, 1.0, 4.0]), max_size=5), size=SIZES)
def test_nothing_is_lost_where_nothing_counts(weights: list[float], size: int) -> None:
    """Updates of weight 0 apply what was left out before, or keep it."""

    class Matrix(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(4, 5, dtype=torch.float64))

    given = torch.randn(len(weights), size, 4, 5, dtype=torch.float64)

    def train(world: af.World) -> tuple[torch.Tensor, torch.Tensor]:
        state = af.TrainState.create(
            model=Matrix,
            optimizer=functools.partial(torch.optim.SGD, lr=1.0),
            setup=af.chain(af.wrap_ddp(), low_rank()),
            world=world,
        )
        step = af.make_step(lambda net, x: af.Loss((net.weight * x[0]).sum(), x[1]))
        for weight, each in zip(weights, given, strict=True):
            batch = each[world.rank] * bool(weight), weight / size
            state, _ = step(state, batch)
        left = state.slots["compress_grads"]["error"].get("weight", torch.zeros(4, 5))
        return -state.params["weight"], left

    found = simulate(size, train).results
    applied = found[0][0] + sum(left for _, left in found) / size
    sums = (each.sum(0) / w for w, each in zip(weights, given, strict=True) if w)
    true = sum(sums, torch.zeros(4, 5, dtype=torch.float64))
    assert float((applied - true).abs().max()) <= 1e-9


@given(seed=st.integers(0, 99))
def test_factors_follow_the_gradients(seed):
    """The right factor of an update is the left one of the next: a power iteration."""
    matrix = torch.randn(4, 5, generator=torch.Generator().manual_seed(seed)).double()

    def train(world: af.World) -> list[torch.Tensor]:
        state = af.TrainState.create(
            model=lambda: nn.Linear(5, 4, bias=False, dtype=torch.float64),
            optimizer=functools.partial(torch.optim.SGD, lr=1.0),
            setup=af.chain(af.wrap_ddp(), low_rank()),
            world=world,
        )
        step, found = af.make_step(lambda net, x: (net.weight * x).sum()), []
        for _ in range(2):
            before = state.params["weight"].clone()
            state, _ = step(state, matrix)
            found.append(before - state.params["weight"])
        return found

    first, second = simulate(2, train)[0]
    error = 2 * matrix - first
    basis = torch.linalg.qr(error @ torch.linalg.svd(first).Vh[:1].mH).Q
    torch.testing.assert_close(second, basis @ (error.mH @ basis).mH)


@given(
    run=runs(dyadic=False, kind="plain", updates=3),
    size=SIZES,
    start=st.integers(0, 2),
    bucket=BUCKETS,
)
def test_full_rank_is_the_plain_mean(run, size, start, bucket):
    """Of matrices whose every column is kept nothing is lost, however they lie in buckets."""
    run = attrs.evolve(run, optimizer="momentum")
    expected = trained(size, run, DDP)
    setup = af.shard_data(), af.wrap_ddp(bucket_cap_mb=bucket), low_rank(IN, start)
    for (one, _), (two, _) in zip(expected, trained(size, run, *setup), strict=True):
        assert differences(one[-1], without_slots(two[-1]), within=1e-7) == []


def sums_of(world: af.World, run: Run, setup: af.chain) -> tuple[Found, Found, Found]:
    """Return the sums of true gradients and of those applied, and what is left out."""
    state = attrs.evolve(run, setup=setup).state(world)
    compute, step = (
        make(LOSSES[run.loss]) for make in (af.value_and_grad, af.make_step)
    )
    true = {name: torch.zeros_like(param) for name, param in state.params.items()}
    first = {name: param.clone() for name, param in state.params.items()}
    for _, batch in zip(range(run.updates), af.batches(state), strict=False):
        _, grads = compute(state, batch, sync=False)
        grads = af.sync_grads(state, grads)
        for name, mean in grads.tensors.items():
            true[name] += mean
        state, _ = step(state, batch)
    applied = {name: (first[name] - p) / 0.125 for name, p in state.params.items()}
    return true, applied, dict(state.slots["compress_grads"]["error"])


@transform
class Rescaled:
    """Scale losses by another power of 2 at each update, as fp16 does after an overflow."""

    exponents: tuple[int, ...]

    @property
    def tells(self) -> Mapping[str, Any]:
        return {"loss_scale": self._scale}

    def _scale(self, state: af.TrainState) -> torch.Tensor:
        exponent = self.exponents[state.num_tried % len(self.exponents)]
        return torch.tensor(2.0**exponent)


@given(
    run=runs(dyadic=False, kind="plain", updates=4, schedule=False),
    size=SIZES,
    start=st.integers(0, 2),
    parts=st.integers(1, 3),
    scales=st.none() | st.lists(st.integers(-8, 8), min_size=4, max_size=4),
)
def test_what_is_left_out_is_not_lost(run, size, start, parts, scales):
    """What was applied, and the ranks' mean of what is left, add up to the true gradients.

    Losses may be scaled, by another factor at each update.
    """
    optimizer = functools.partial(torch.optim.SGD, lr=0.125)
    setup = af.chain(
        DDP,
        low_rank(1, start),
        af.accumulate(num_micro_batches=parts),
        None if scales is None else Rescaled(tuple(scales)),
    )

    def train(world: af.World) -> tuple[Found, Found, Found]:
        with_rate = Rated(**attrs.asdict(run, recurse=False), factory=optimizer)
        return sums_of(world, with_rate, setup)

    results = simulate(size, train).results
    true, applied, errors = results[0]
    for name, expected in true.items():
        left = sum(error[name] for _, _, error in results if name in error) / size
        found = applied[name] + (left if name in errors else 0)
        scale = max(1.0, float(expected.abs().max()))
        assert float((found - expected).abs().max()) <= 1e-9 * scale
        assert (name in errors) == (expected.ndim == 2)


@attrs.frozen
class Rated(Run):
    """A run with an optimizer of its own."""

    factory: Any = None

    def program(self) -> Any:
        return attrs.evolve(super().program(), optimizer=self.factory)


@given(
    run=runs(dyadic=False, kind="plain", updates=4),
    size=st.integers(2, 3),
    start=st.integers(0, 2),
    cut=st.integers(0, 4),
)
def test_a_cut_run_goes_on_with_what_was_left_out(run, size, start, cut):
    """Saved and loaded at any update, each rank goes on bitwise as if it had not been."""
    run = attrs.evolve(run, setup=af.chain(DDP, low_rank(1, start)))
    with tempfile.TemporaryDirectory() as folder:

        def cut_and_whole(world: af.World) -> tuple[Found, Found]:
            whole, _ = run.train(run.state(world), 4)
            state, _ = run.train(run.state(world), cut)
            af.save(state, Path(folder) / "saved")
            state = af.load(run.state(world), Path(folder) / "saved")
            state, _ = run.train(state, 4 - cut)
            return tensors(whole), tensors(state)

        for one, two in simulate(size, cut_and_whole).results:
            assert differences(one, two) == []


@given(
    run=runs(dyadic=False, kind="plain"),
    sizes=st.lists(st.integers(2, 4), min_size=2, max_size=2, unique=True),
)
def test_other_ranks_take_over_what_was_left_out(run: Run, sizes: list[int]) -> None:
    """Loaded on another number of ranks, the mean of what is left is what it was."""
    run = attrs.evolve(run, setup=af.chain(DDP, low_rank()))
    with tempfile.TemporaryDirectory() as folder:

        def saved(world: af.World) -> Found:
            state, _ = run.train(run.state(world), 2)
            af.save(state, Path(folder) / "saved")
            return dict(state.slots["compress_grads"]["error"])

        def loaded(world: af.World) -> Found:
            state = af.load(run.state(world), Path(folder) / "saved")
            return dict(state.slots["compress_grads"]["error"])

        before, after = (
            simulate(size, fn).results
            for size, fn in zip(sizes, (saved, loaded), strict=True)
        )
    means = [
        {name: sum(each[name] for each in found) / len(found) for name in found[0]}
        for found in (before, after)
    ]
    assert differences(*means, within=1e-12) == []


@pytest.mark.filterwarnings(
    "ignore::accelfn.errors.AccelfnWarning"
)  # not the state's data
@given(run=runs(dyadic=False, kind="plain"), size=SIZES, bad=st.integers(0, 3))
def test_a_skipped_update_leaves_what_was_left_out(run, size, bad):
    """A gradient that is not finite is in no memory: training goes on without its batch."""
    run = attrs.evolve(run, setup=af.chain(DDP, low_rank(), af.skip_nonfinite()))

    def loss_fn(net: nn.Module, batch: Any) -> torch.Tensor:
        values, factor = batch
        return LOSSES["squared"](net, values) * factor

    def train(world: af.World, *, leave_out: bool) -> Found:
        state, step = run.state(world), af.make_step(loss_fn)
        values = tuple(each[world.rank % run.n :] for each in run.dataset())
        for i in range(4):
            if i != bad or not leave_out:
                state, _ = step(state, (values, torch.nan if i == bad else 1.0))
        apart = ("num_skipped", "slots.skip_nonfinite")
        return {k: v for k, v in tensors(state).items() if not k.startswith(apart)}

    with_bad, without = (
        simulate(size, functools.partial(train, leave_out=out)).results
        for out in (False, True)
    )
    for one, two in zip(with_bad, without, strict=True):
        assert differences(one, two) == []


@given(run=runs(updates=2, kind="plain"), size=SIZES, parts=st.integers(2, 4))
def test_bytes_go_down_and_only_the_last_micro_batch_sends(run, size, parts):
    """Gradients of 8 bytes are sent in 2, matrices as their factors, and once an update."""

    def sent(method: Any, number: int = 1) -> list[int]:
        setup = af.chain(DDP, method, af.accumulate(num_micro_batches=number))
        split = attrs.evolve(run, setup=setup)
        log = simulate(size, lambda world: split.train(split.state(world))).log
        found = [each for each in log if each.kind == "all_reduce"]
        compared = [each.label or "" for each in found]
        return [
            each.num_bytes
            for each, label in zip(found, compared, strict=True)
            if not label.startswith("compare ")
        ]

    count = sum(param.numel() for param in run.state().params.values())
    carrier, weight = 1, 8
    assert sum(sent(None)) == 2 * 8 * (count + carrier)
    for method in NARROW:
        assert sum(sent(af.compress_grads(method))) == 2 * (
            2 * (count + carrier) + weight
        )
    factors = sum(
        sum(param.shape) if param.ndim == 2 else param.numel()
        for param in run.state().params.values()
    )
    assert sum(sent(low_rank())) == 2 * (8 * factors + weight)
    for method in (af.compress_grads("fp16"), low_rank()):
        assert sent(method, parts) == sent(method)


@given(
    shape=st.tuples(st.integers(1, 12), st.integers(1, 12)),
    rank=st.integers(1, 6),
    rate=st.sampled_from([0.0, 0.5, 1.0, 1.5, 2.0]),
)
def test_a_matrix_is_sent_as_factors_where_that_pays(shape, rank, rate):
    """Of a rank that it can have, and if they are fewer numbers by the rate that was asked."""
    rows, columns = shape
    method = attrs.evolve(low_rank(rank), min_compression_rate=rate)

    def train(world: af.World) -> None:
        state = af.TrainState.create(
            model=lambda: nn.Linear(columns, rows, bias=False, dtype=torch.float64),
            optimizer=functools.partial(torch.optim.SGD, lr=0.1),
            setup=af.chain(DDP, method),
            world=world,
        )
        step = af.make_step(lambda net, x: net(x).square().mean())
        step(state, torch.ones(2, columns, dtype=torch.float64) + world.rank)

    factors, whole = (rows + columns) * min(rank, *shape), rows * columns
    log = simulate(2, train).log
    sent = [e for e in log if e.kind == "all_reduce" and e.step is not None]
    told = [e.num_bytes for e in sent if not (e.label or "").startswith("compare ")]
    numbers = factors if factors * rate < whole else whole
    assert sum(told) == 8 * (numbers + 1)  # and the weight
