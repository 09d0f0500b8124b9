# SPDX-License-Identifier: Apache-2.0
"""Gradients as values: what they weigh, what they leave out, and whose state they meet."""

import functools
from itertools import pairwise
from typing import Any

import attrs
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import DTensor

import accelfn as af
from accelfn.testing import simulate
from tests.internals import Update, transform
from tests.laws.reducing import SumAll
from tests.laws.test_flow import Scales
from tests.laws.worlds import single
from tests.strategies import LOSSES, Run, differences, runs, tensors

WEIGHTS = st.lists(st.sampled_from([0, 0, 0.5, 3]), min_size=1, max_size=3)


def number(
    world: af.World, *setup: object, data: af.Data | None = None
) -> af.TrainState:
    """Return the state of one number, 1, that decays."""
    return af.TrainState.create(
        model=lambda: nn.ParameterList([torch.ones((), dtype=torch.float64)]),
        optimizer=functools.partial(torch.optim.SGD, lr=0.5, weight_decay=0.25),
        data=data,
        setup=af.chain(*setup),
        world=world,
    )


@given(
    weights=st.lists(WEIGHTS, min_size=1, max_size=3),
    tensor=st.booleans(),
    scale=st.sampled_from([None, 4.0]),
    how=st.sampled_from(["ddp", "no views", "by hand"]),
)
def test_weights_of_nothing(weights, *, tensor, scale, how):
    """What has no weight counts for nothing; where nothing has any, gradients are 0."""
    parts = max(map(len, weights))
    weights = [each + [0] * (parts - len(each)) for each in weights]
    ddp = af.wrap_ddp(gradient_as_bucket_view=how == "ddp")

    def loss(net: nn.Module, given: tuple[float, float]) -> af.Loss:
        slope, weight = given
        total = net[0] * slope
        return af.Loss(total, torch.tensor(weight) if tensor else weight)

    def train(world: af.World) -> tuple[float, float]:
        scaling = None if scale is None else Scales(scale)
        state = number(world, scaling, ddp if how != "by hand" else None)
        compute, grads = af.value_and_grad(loss), None
        for i, weight in enumerate(weights[world.rank]):
            sync = how != "by hand" and i == parts - 1
            slope = 2.0**i + world.rank
            _, grads = compute(state, (slope, weight), into=grads, sync=sync)
        grads = af.sync_grads(state, grads) if how == "by hand" else grads
        weight = float(grads.weight)
        return float(af.apply_grads(state, grads).params["0"]), weight

    whole = sum(map(sum, weights))
    slopes = sum(
        2.0**i + rank
        for rank, each in enumerate(weights)
        for i, weight in enumerate(each)
        if weight
    )
    expected = 1 - 0.5 * ((slopes / whole if whole else 0.0) + 0.25)
    for found, weight in simulate(len(weights), train):
        assert abs(found - expected) <= 1e-12 * max(1.0, abs(expected))
        assert abs(weight - whole) <= 1e-6


@transform
class Drops:
    """Leave some gradients out."""

    names: tuple[str, ...]

    def grads(self, grads: af.Grads, slot: None, update: Update) -> Any:
        kept = {n: g for n, g in grads.tensors.items() if n not in self.names}
        return grads.with_tensors(kept), slot


NAMES = ["first.weight", "first.bias", "head.weight", "head.bias"]


@given(
    dropped=st.sets(st.sampled_from(NAMES), max_size=3),
    optimizer=st.sampled_from(["momentum", "adamw", "decay"]),
    parts=st.integers(1, 2),
)
def test_what_is_left_out_stays(dropped: set[str], optimizer: str, parts: int) -> None:
    """A parameter whose gradient a transform leaves out stays; all others go as ever."""
    run = Run(n=12, batch_size=6, dyadic=False, loss="squared", optimizer=optimizer)
    run = attrs.evolve(run, setup=af.accumulate(num_micro_batches=parts))
    state, _ = run.train(run.state(), 2)
    plain, _ = run.train(state.copy(), 1)
    before, expected = tensors(state), tensors(plain)
    drops = Drops(tuple(sorted(dropped)))
    found = tensors(run.train(state.with_setup(af.chain(run.setup, drops)), 1)[0])
    for path in expected:
        stays = any(name in path for name in dropped)
        assert torch.equal(found[path], (before if stays else expected)[path])


@given(kinds=st.lists(st.booleans(), min_size=1, max_size=4))
def test_what_is_added_keeps_the_place(kinds: list[bool]) -> None:
    """Plain values may be added to batches, in any order: the cursor is that of the batches."""
    run = Run(n=12, batch_size=4, dyadic=False)
    state = run.state()
    compute, grads = af.value_and_grad(LOSSES["mean"]), None
    batch = next(iter(af.batches(state)))
    for is_plain in kinds:
        _, grads = compute(state, batch.value if is_plain else batch, into=grads)
    after = af.apply_grads(state, grads)
    seen = 0 if all(kinds) else 4
    assert (after.cursor.samples, after.step) == (seen, 1)
    assert (grads.taken.num_micro_batches, float(grads.weight)) == (
        len(kinds),
        4 * len(kinds),
    )


@given(
    sizes=st.lists(st.integers(1, 4), min_size=2, max_size=4),
    kind=st.sampled_from(["of batches", "plain", "totals"]),
)
def test_what_is_added_is_what_one_pass_gives(sizes: list[int], kind: str) -> None:
    """Pieces of any sizes, each a whole batch of its own, add up as samples of one do."""
    sums = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    x = torch.arange(1.0, sums[-1] + 1, dtype=torch.float64)

    def loss(net: nn.Module, batch: torch.Tensor) -> torch.Tensor | af.Loss:
        each = (net[0] * batch - 1) ** 2
        return af.Loss(each.sum(), len(each)) if kind == "totals" else each.mean()

    def taken(pieces: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        compute, grads, state = af.value_and_grad(loss), None, number(single())
        for piece in pieces:
            data = number(single(), data=af.Data(piece, global_batch_size=len(piece)))
            batch = next(iter(af.batches(data)))
            is_batch = kind == "of batches"
            _, grads = compute(state, batch if is_batch else piece, into=grads)
        seen = torch.as_tensor(grads.weight).double()
        return seen, af.apply_grads(state, grads).params["0"].clone()

    (weight, param), (whole, expected) = map(
        taken, ([x[a:b] for a, b in pairwise(sums)], [x])
    )
    assert float(weight) == float(whole) == sums[-1]
    assert torch.allclose(param, expected, rtol=1e-12, atol=0)


@given(
    run=runs(dyadic=False),
    size=st.integers(1, 4),
    parts=st.integers(1, 3),
    ways=st.tuples(*[st.sampled_from(["unread", "read", "mapped", "replaced"])] * 2),
    reduce=st.sampled_from([af.wrap_ddp(), af.wrap_fsdp(), SumAll(), None]),
)
def test_gradients_are_those_of_the_mean(run, size, parts, ways, reduce):
    """In any layout a custom step reads the same, and reading changes no update."""
    run = attrs.evolve(run, setup=af.chain())
    compute = af.value_and_grad(LOSSES[run.loss])

    def read(grads: af.Grads, way: str) -> af.Grads:
        if way == "read":
            assert isinstance(grads.tensors, dict)
        if way == "mapped":
            grads = grads.map(torch.Tensor.clone)
        return grads.with_tensors(grads.tensors) if way == "replaced" else grads

    def go(world: af.World, *setup: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        state = attrs.evolve(run, setup=af.chain(*setup)).state(world)
        batch = next(iter(af.batches(state)))
        _, grads = compute(state, batch)
        grads = read(grads, ways[0])
        if not grads.reduced and reduce is None:
            grads = af.sync_grads(state, grads)
        grads = read(grads, ways[1])
        shown = grads.tensors if grads.reduced else {}
        seen = {n: whole(g).clone() for n, g in shown.items()}
        return seen, dict(af.full_params(af.apply_grads(state, grads), at="eval"))

    (alone,) = simulate(1, go)
    split = [af.shard_data(), reduce, af.accumulate(num_micro_batches=parts)]
    for seen, params in simulate(size, lambda world: go(world, *split)):
        torch.testing.assert_close(
            (seen or alone[0], params), alone, rtol=1e-9, atol=1e-9
        )


def whole(grad: torch.Tensor) -> torch.Tensor:
    """Return all of a gradient that is split over the ranks."""
    return grad.full_tensor() if isinstance(grad, DTensor) else grad


def trained(seed: int, optimizer: str) -> af.TrainState:
    run = Run(n=12, batch_size=6, kind="norm", dyadic=False, loss="squared", seed=seed)
    return run.train(attrs.evolve(run, optimizer=optimizer).state(), 2)[0]


@given(
    taken=st.sets(st.sampled_from(["params", "buffers", "opt_state"])),
    optimizer=st.sampled_from(["momentum", "adamw"]),
)
def test_a_state_is_what_it_holds(taken: set[str], optimizer: str) -> None:
    """One that shares some fields with the last is stepped as if it had come first."""
    one, other = trained(0, optimizer), trained(1, optimizer)
    held = {name: getattr(other, f"_{name}") for name in taken}
    mixed = attrs.evolve(one, **held)
    step = af.make_step(LOSSES["squared"])
    batch = next(iter(af.batches(one))).value
    fresh = mixed.copy()
    af.release_engine(fresh)
    expected = tensors(step(fresh, batch)[0])
    af.prepare_engine(one)  # now the engine holds what it shares
    assert differences(expected, tensors(step(mixed, batch)[0])) == []


@example(turns=[0, 1, 0], parts=False)
@given(turns=st.lists(st.integers(-1, 3), min_size=1, max_size=5), parts=st.booleans())
def test_batches_that_are_added_follow_one_another(turns, parts):
    """Added is what begins where the state stands, or the gradients; the furthest counts.

    Plain values (-1) and batches of `af.join_uneven` count for no samples.
    """
    data = af.Data(
        torch.ones(8, dtype=torch.float64), global_batch_size=2, shuffle=False
    )
    world = af.World.single(device="cpu")
    setup = af.accumulate(micro_batch_size=1) if parts else None
    state = number(world, setup, data=data)
    batches = list(af.batches(state, until_epoch=1))
    value = [torch.ones(1)] * 2 if parts else torch.ones(2)
    plain = [value, next(iter(af.join_uneven([value], world)))]
    compute = af.value_and_grad(lambda net, x: (net[0] * x).mean())
    grads, stands = None, 0
    for i, turn in enumerate(turns):
        batch = plain[i % 2] if turn < 0 else batches[turn]
        if turn > 0 and turn not in (stands, stands - 1):
            with pytest.raises(af.errors.BatchError, match=f"sample {2 * turn}"):
                compute(state, batch, into=grads)
            continue
        _, grads = compute(state, batch, into=grads)
        stands = max(stands, turn + 1)
    if grads is not None:
        after = af.apply_grads(state, grads)
        assert after.cursor.epoch * 8 + after.cursor.samples == 2 * stands


@given(
    copies=st.integers(1, 3),
    slope=st.floats(-8, 8),
    given_first=st.booleans(),
    setup=st.sampled_from([af.identity(), SumAll()]),
)
def test_copies_of_gradients_are_their_own(copies, slope, setup, *, given_first):
    """Each is given once, to a copy of the state, whatever became of those it was made of."""
    state = number(af.World.single(device="cpu"), setup)
    compute = af.value_and_grad(lambda net, x: (net[0] * x).mean())
    _, grads = compute(state, torch.tensor([slope], dtype=torch.float64))
    each = [grads.map(torch.Tensor.clone) for _ in range(copies)]
    found = set[float]()
    for one in [grads, *each] if given_first else [*each, grads]:
        found.add(float(af.apply_grads(state.copy(), one).params["0"]))
        with pytest.raises(af.errors.GradsError, match="were passed to af.apply_grads"):
            af.apply_grads(state.copy(), one)
    assert found == {1 - 0.5 * (slope + 0.25)}
