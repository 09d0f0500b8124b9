# SPDX-License-Identifier: Apache-2.0
"""compress_grads: fewer bytes, and the mean over all ranks' samples still.

What 16 bits can hold is exact, and what they cannot is rounded. What PowerSGD leaves out is lost
to nothing that is beside it: loss scales that grow and fall, skips, batches without weight, empty
shares, micro-batches, an optimizer in the backward pass, parameters that are frozen for a while,
and a resume on other ranks with another setup.
"""

import math
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

import accelfn as af
from accelfn.testing import simulate
from tests.internals import transform
from tests.laws.worlds import DDP, Found, trained, without_slots
from tests.states import linear_state
from tests.strategies import IN, LOSSES, Run, differences, runs, tensors

NARROW = {"fp16": (torch.float16, 2.0**-11), "bf16": (torch.bfloat16, 2.0**-8)}
SIZES = st.integers(2, 4)
SGD = partial(torch.optim.SGD, lr=1.0)


def low_rank(rank: int = 1, start: int = 0, rate: float = 0) -> Any:
    """Return PowerSGD that compresses every matrix."""
    return af.compress_grads(
        "powersgd",
        matrix_approximation_rank=rank,
        start_powerSGD_iter=start,
        min_compression_rate=rate,
    )


def matrix(rows: int, columns: int, method: Any, world: af.World) -> af.TrainState:
    """Return a state of one matrix."""
    return linear_state(
        model=lambda: nn.Linear(columns, rows, bias=False, dtype=torch.float64),
        optimizer=SGD,
        setup=af.chain(af.wrap_ddp(), method),
        world=world,
    )


@given(seed=st.integers(0, 99))
def test_factors_follow_the_gradients(seed):
    """The right factor of an update is the left one of the next: a power iteration."""
    given = torch.randn(4, 5, generator=torch.Generator().manual_seed(seed)).double()

    def train(world: af.World) -> list[torch.Tensor]:
        state, found = matrix(4, 5, low_rank(), world), []
        step = af.make_step(lambda net, x: (net.weight * x).sum())
        for _ in range(2):
            before = state.params["weight"].clone()
            state, _ = step(state, given)
            found.append(before - state.params["weight"])
        return found

    first, second = simulate(2, train)[0]
    error = 2 * given - first
    basis = torch.linalg.qr(error @ torch.linalg.svd(first).Vh[:1].mH).Q
    torch.testing.assert_close(second, basis @ (error.mH @ basis).mH)


@given(
    run=runs(dyadic=False, kind="plain", optimizer="momentum", updates=3),
    size=SIZES,
    start=st.integers(0, 2),
    bucket=st.sampled_from([None, 1e-5]),
)
def test_full_rank_is_the_plain_mean(run, size, start, bucket):
    """Of matrices whose every column is kept nothing is lost, however they lie in buckets."""
    expected = trained(size, run, DDP)
    setup = af.shard_data(), af.wrap_ddp(bucket_cap_mb=bucket), low_rank(IN, start)
    for (one, _), (two, _) in zip(expected, trained(size, run, *setup), strict=True):
        assert differences(one[-1], without_slots(two[-1]), within=1e-7) == []


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
            af.save(state, f"{folder}/saved")
            state = af.load(run.state(world), f"{folder}/saved")
            return tensors(whole), tensors(run.train(state, 4 - cut)[0])

        for one, two in simulate(size, cut_and_whole):
            assert differences(one, two) == []


def reduced(log: Any) -> list[int]:
    """Return the bytes of each sum of gradients."""
    sums = [each for each in log if each.kind == "all_reduce" and each.step is not None]
    return [e.num_bytes for e in sums if not (e.label or "").startswith("compare ")]


@given(run=runs(updates=2, kind="plain"), size=SIZES, parts=st.integers(2, 4))
def test_bytes_go_down_and_only_the_last_micro_batch_sends(run, size, parts):
    """Gradients of 8 bytes are sent in 2, matrices as their factors, and once an update."""

    def sent(method: Any, number: int = 1) -> int:
        setup = af.chain(DDP, method, af.accumulate(num_micro_batches=number))
        split = attrs.evolve(run, setup=setup)
        return sum(reduced(simulate(size, lambda w: split.train(split.state(w))).log))

    shapes = [param.shape for param in run.state().params.values()]
    count = sum(shape.numel() for shape in shapes)
    factors = sum(sum(s) if len(s) == 2 else s.numel() for s in shapes)
    carrier, weight = 1, 8
    assert sent(None) == 2 * 8 * (count + carrier)
    for method in NARROW:
        narrow = 2 * (2 * (count + carrier) + weight)
        assert sent(af.compress_grads(method)) == narrow
    assert sent(low_rank()) == 2 * (8 * factors + weight)
    for method in (af.compress_grads("fp16"), low_rank()):
        assert sent(method, parts) == sent(method)


@given(
    shape=st.tuples(st.integers(1, 12), st.integers(1, 12)),
    rank=st.integers(1, 6),
    rate=st.sampled_from([0.0, 0.5, 1.0, 1.5, 2.0]),
)
@example(shape=(2, 12), rank=6, rate=0.5)
def test_a_matrix_is_sent_as_factors_where_that_pays(shape, rank, rate):
    """Of a rank that it can have, and if they are fewer numbers by the rate that was asked."""
    rows, columns = shape
    step = af.make_step(lambda net, x: net(x).square().mean())

    def train(world: af.World) -> None:
        rows_of_rank = torch.ones(2, columns, dtype=torch.float64) + world.rank
        step(matrix(rows, columns, low_rank(rank, rate=rate), world), rows_of_rank)

    factors, whole = (rows + columns) * min(rank, *shape), rows * columns
    numbers = factors if factors * rate < whole else whole
    assert sum(reduced(simulate(2, train).log)) == 8 * (numbers + 1)  # and the weight


# 16 bits


@attrs.frozen
class Heavy(Run):
    """A run whose totals 16 bits cannot hold, nor their weights, which they would round."""

    def program(self) -> Any:
        def loss(net: nn.Module, batch: Any) -> af.Loss:
            total = (net(batch[0]) * batch[1]).sum() * 4096
            return af.Loss(total, 4096.0 + len(batch[0]))

        return attrs.evolve(super().program(), loss=loss)


@given(
    run=runs(dyadic=True, updates=1, kind="plain", loss="mean"),
    size=st.sampled_from([2, 4]),
    cls=st.sampled_from([Run, Heavy]),
)
def test_what_16_bits_can_hold_is_exact(run, size, cls):
    """On small integers the update is bitwise the plain one, whatever the weight is."""
    run = cls(**attrs.asdict(run, recurse=False))
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
    def tells(self) -> dict[str, Any]:
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


@given(
    mean=st.floats(2.0**-14, 60_000),
    rows=st.lists(st.integers(1, 500), min_size=2, max_size=4),
)
def test_a_total_overflows_no_sooner_than_its_mean(mean, rows):
    """A mean gradient that 16 bits can hold arrives, however many samples it is of."""
    step = af.make_step(lambda net, x: (net[0] * x).mean())

    def train(world: af.World) -> float:
        state = linear_state(
            model=lambda: nn.ParameterList([torch.zeros(())]),
            optimizer=SGD,
            setup=af.chain(af.wrap_ddp(), af.compress_grads("fp16")),
            world=world,
        )
        state, _ = step(state, torch.full((rows[world.rank],), mean))
        return -float(state.params["0"])

    for found in simulate(len(rows), train):
        assert abs(found - mean) <= mean * 2**-10 * len(rows)


# What low rank leaves out

LR = 0.125
HEAD = "2."


def net() -> nn.Module:
    """Return two layers in float64, always the same."""
    made = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    for i, param in enumerate(made.parameters()):
        ramp = torch.arange(param.numel(), dtype=torch.float64).view_as(param)
        param.data = ((ramp + i) * 7 % 5 - 2) / 4
    return made


def total_of(net: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    x, y, weights = batch
    return ((net(x) - y).square().sum(1) * weights).sum(), weights.sum()


MICRO = af.accumulate(num_micro_batches=2)
# both its scale and the unit of its losses move
FP16 = af.autocast("fp16", init_scale=64.0, growth_factor=8.0, growth_interval=1)
BESIDE = {
    "nothing": (),
    "micro-batches": (MICRO,),
    "in backward": (af.optimizer_in_backward(),),
    "fp16": (FP16, MICRO),
    "skips": (af.skip_nonfinite(),),
}


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
        compress, ddp = low_rank(self.rank, self.start), af.wrap_ddp
        return af.chain(
            af.shard_data(), ddp(bucket_cap_mb=self.bucket), compress, *BESIDE[beside]
        )

    def gradient(self, params: Found, update: int) -> Found:
        """Return the gradient of a batch, in plain torch."""
        starts = range(0, self.n, self.batch_size)
        begin = starts[update % len(starts)]
        batch = [each[begin : begin + self.batch_size] for each in self.samples()]
        model = net()
        model.load_state_dict(params)
        model[2].requires_grad_(update not in self.frozen)
        total, weight = total_of(model, batch)
        (total / (weight or 1.0)).backward()
        return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@attrs.frozen
class Moment:
    """What a rank holds behind an update."""

    params: Found
    left: Found
    count: int


def train(setup: Setup, folder: Path, world: af.World, *, first: bool) -> list[Moment]:
    """Train to the cut and save, or load and train from there to the end."""
    state = linear_state(
        model=net,
        optimizer=partial(torch.optim.SGD, lr=LR),
        data=af.Data(setup.samples(), global_batch_size=setup.batch_size),
        setup=setup.chain(setup.beside[0]),
        world=world,
    )
    if not first:
        state = af.load(state, folder, allow=("trainable",))
        state = state.with_setup(setup.chain(setup.beside[1]))
    step = af.make_step(lambda net, batch: af.Loss(*total_of(net, batch)))
    moments = list[Moment]()
    for i in range(setup.cut) if first else range(setup.cut, setup.updates):
        frozen = HEAD if i in setup.frozen else "nothing"
        state = state.with_trainable(lambda name, _, f=frozen: not name.startswith(f))
        state, _ = step(state, next(iter(af.batches(state))))
        slot = state.slots["compress_grads"]
        left = {name: error.clone() for name, error in slot["error"].items()}
        params = {name: param.clone() for name, param in state.params.items()}
        moments.append(Moment(params, left, slot["iter"]))
    if first:
        af.save(state, folder)
    return moments


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    n, updates = draw(st.integers(2, 10)), draw(st.integers(1, 7))
    beside = draw(st.tuples(*[st.sampled_from(list(BESIDE))] * 2))
    judged = all(each in ("fp16", "skips") for each in beside)
    return Setup(
        sizes=draw(st.tuples(*[st.integers(2, 3)] * 2)),
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


UNWEIGHED = Setup(
    sizes=(2, 2),
    beside=("nothing", "nothing"),
    start=0,
    rank=1,
    bucket=25.0,
    broken=None,
    n=9,
    batch_size=2,
    seed=0,
    updates=5,
    cut=0,
    frozen=range(0),
)
"""In one of the updates, all samples have the weight 0."""


@given(setup=setups())
@example(setup=UNWEIGHED)
@example(setup=attrs.evolve(UNWEIGHED, beside=("fp16", "fp16")))
@example(setup=attrs.evolve(UNWEIGHED, sizes=(3, 2), cut=2))
def test_nothing_that_is_left_out_is_lost(setup):
    """After each update the gradients of all so far are what moved the parameters and is left."""
    with tempfile.TemporaryDirectory() as folder:
        halves = [
            simulate(size, partial(train, setup, Path(folder) / "it", first=first))
            for size, first in zip(setup.sizes, (True, False), strict=True)
        ]
    found = [ranks for half in halves for ranks in zip(*half, strict=True)]
    begun = {name: param.detach() for name, param in net().named_parameters()}
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
