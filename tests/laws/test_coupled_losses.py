# SPDX-License-Identifier: Apache-2.0
"""Losses that couple samples over ranks train as on one process, with any last batch."""

from functools import partial
from itertools import zip_longest
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

import accelfn as af
from accelfn.testing import simulate
from tests.processes import run_ranks
from tests.states import linear_state

SEEDED = torch.Generator().manual_seed(1)
ROWS = torch.randn(24, 5, dtype=torch.float64, generator=SEEDED)


class Towers(nn.Module):
    """Two towers, a router, and a center that each update moves."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("a", "b", "router"):
            self.add_module(name, nn.Linear(5, 3, dtype=torch.float64))
        self.register_buffer("center", torch.zeros(3, dtype=torch.float64))


def contrastive(world, model, x):
    """Gather the embeddings of two towers, as the reference does."""
    a, b = af.all_gather((model.a(x), model.b(x.flip(1))), world, grad=True)
    return functional.cross_entropy(a @ b.T, torch.arange(len(a)))


def masked(world, model, x, *, sample_weight):
    """Gather rows that count, and any number of them."""
    assert sample_weight.shape == (len(x),)
    kept = model.a(x)[sample_weight > 0]
    everyone = af.all_gather(kept, world, grad=True, ragged=True)
    return (everyone @ everyone.T).logsumexp(1).mean()


def variance(world, model, x):
    """Two views of each sample, and the covariance over all."""
    everyone = af.all_gather(torch.cat([model.a(x), model.b(x)]), world, grad=True)
    centred = everyone - everyone.mean(0)
    return (centred.T @ centred / len(everyone)).square().mean()


def balance(world, model, x):
    """The share of samples that each expert gets over all ranks, times what routes there."""
    routed = model.router(x).softmax(1)
    share = functional.one_hot(routed.argmax(1), 3).double().mean(0)
    share = af.all_reduce(share, world, "mean")
    return 3 * (share * routed.mean(0)).sum() + model.a(x).square().mean()


def summed(world, model, x, *, sample_weight):
    """The same by sums, of the samples that count."""
    routed = model.router(x).softmax(1)
    chosen = functional.one_hot(routed.argmax(1), 3) * sample_weight[:, None]
    share, whole = af.all_reduce((chosen.sum(0), sample_weight.sum()), world)
    return 3 * (share / whole * routed.mean(0)).sum() + model.b(x).square().mean()


def centered(world, model, x):
    """Outputs less a center, which moves to the mean over all ranks."""
    out = model.a(x)
    if model.training:
        mean = af.all_gather(out.detach(), world).mean(0)
        model.center = 0.5 * model.center + 0.5 * mean
    return ((out - model.center).softmax(1) * model.b(x)).sum(1).mean()


LOSSES = [contrastive, masked, variance, balance, summed, centered]
UNUSED = af.wrap_ddp(find_unused_parameters=True)
SPLIT = af.wrap_fsdp(find_unused_parameters=True)
OWN_BUFFERS = af.wrap_ddp(find_unused_parameters=True, forward_sync_buffers=False)


def trained(world, make, setup, n, size):
    """Return losses, parameters, and what is measured at the end."""
    data = af.Data(ROWS[:n], global_batch_size=size)
    state = linear_state(
        model=Towers, data=data, setup=af.chain(af.shard_data(), setup), world=world
    )
    loss, seen = partial(make, world), list[float]()
    step = af.make_step(loss)
    for batch in af.batches(state, until_epoch=2):
        state, metrics = step(state, batch)
        seen.append(metrics.all_reduce_mean(world)["loss"])
    measured = af.evaluate(state, data, loss)
    return seen, dict(af.full_params(state, at="eval")), measured


CLOSE = {"rtol": 1e-12, "atol": 1e-12}
ALONE = af.World()


@settings(max_examples=max(6, settings().max_examples // 20))
@given(
    make=st.sampled_from(LOSSES),
    setup=st.sampled_from(
        [UNUSED, OWN_BUFFERS, af.wrap_fsdp(find_unused_parameters=True)]
    ),
    ranks=st.integers(2, 8),
    n=st.integers(2, len(ROWS)),
    size=st.integers(1, len(ROWS)),
)
@example(contrastive, UNUSED, 4, 11, 8)
@example(contrastive, UNUSED, 2, 23, 23)
@example(centered, OWN_BUFFERS, 4, 11, 8)
def test_coupled_losses_train_as_on_one_process(make, setup, ranks, n, size):
    """Shares may be uneven or empty, in training and in evaluation."""
    alone = trained(ALONE, make, None, n, size)
    for found in simulate(ranks, lambda world: trained(world, make, setup, n, size)):
        torch.testing.assert_close(found, alone, **CLOSE)


def alike(world, model, x):
    """Let all pairs of rows count, in whatever order they are."""
    everyone = af.all_gather(model(x), world, grad=True)
    return (everyone @ everyone.T).logsumexp(1).mean()


def linear(world, data=None, *setup):
    """Return the state of one layer, with data of some rows in batches of some size."""
    rows, size = data or (0, 0)
    return linear_state(
        model=lambda: nn.Linear(5, 3, dtype=torch.float64),
        data=data and af.Data(ROWS[:rows], global_batch_size=size),
        setup=af.chain(af.shard_data(), af.wrap_ddp(), *setup),
        world=world,
    )


@given(
    counts=st.lists(
        st.lists(st.integers(1, 3), min_size=1, max_size=3), min_size=2, max_size=4
    )
)
@settings(max_examples=max(6, settings().max_examples // 20))
def test_ranks_that_go_together_couple_what_they_have(counts: list[list[int]]) -> None:
    """In lockstep ranks have batches of any sizes, and one that has ended none."""

    def batches(rank: int) -> list[torch.Tensor]:
        return [ROWS[i + 3 * rank :][:count] for i, count in enumerate(counts[rank])]

    def train(world: af.World, having: Any) -> torch.Tensor:
        state, step = linear(world), af.make_step(partial(alike, world))
        for batch in having(world):
            state, _ = step(state, batch)
        return state.params["weight"].clone()

    each = zip_longest(*map(batches, range(len(counts))), fillvalue=ROWS[:0])
    expected = train(ALONE, lambda _: map(torch.cat, each))
    joined = lambda world: af.join_uneven(batches(world.rank), world)  # noqa: E731
    for found in simulate(len(counts), lambda world: train(world, joined)):
        torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.parametrize(
    "call",
    [
        lambda x, world: af.all_reduce(x.sum(0), world),
        lambda x, world: af.start_all_reduce(x.sum(0), world, "max").wait(),
        lambda x, world: af.all_gather_objects(x.sum().item(), world),
        lambda x, world: af.all_to_all([x] * world.size, world),
    ],
)
def test_a_stand_in_that_would_count_is_refused_on_all_ranks(call):
    """A loss that does not ask which samples count names the ranks that have none."""

    def train(world: af.World) -> list[str]:
        def loss(model: Any, x: Any) -> Any:
            call(x, world)
            return model(x).square().mean()

        state, told = linear(world, (7, 6)), list[str]()
        step = af.make_step(loss)
        for batch in af.batches(state, until_epoch=1):
            try:
                state, _ = step(state, batch)
            except af.errors.LossError as error:
                told.append(str(error))
        assert state.step == 1
        return told

    for (told,) in simulate(3, train):
        assert "rank 1, 2 has no sample" in told
        assert "sample_weight" in told


def test_micro_batches_that_couple_are_warned_of():
    """A gather in one of several micro-batches sees no other."""

    def train(world: af.World, parts: int) -> None:
        state = linear(world, (24, 12), af.accumulate(num_micro_batches=parts))
        step = af.make_step(partial(alike, world))
        for batch in af.batches(state, until_epoch=1):
            state, _ = step(state, batch)

    simulate(2, lambda world: train(world, 1))
    with pytest.warns(af.errors.AccelfnWarning, match="several micro-batches"):
        simulate(2, lambda world: train(world, 2))


@af.transform
class PassesOn:
    """Wrap a loss without knowing its keywords."""

    def loss(self, loss_fn, slot, update):
        def passed(model, batch, *extras):
            return loss_fn(model, batch, *extras)

        return passed, slot


def test_a_loss_knows_which_of_its_samples_count():
    """Under extras, counts, transforms and micro-batches, and for plain values."""

    def loss(model: Any, x: Any, extra: int, count: int, *, sample_weight: Any) -> Any:
        seen.append((extra, count, sample_weight.tolist()))
        return model(x).square().sum() / count

    def train(world: af.World) -> None:
        state = linear(world, (3, 3), PassesOn(), af.accumulate(num_micro_batches=2))
        step = af.make_step(loss, count=len)
        for batch in af.batches(state, until_epoch=1):
            state, _ = step(state, batch, 5)
        if world.size == 1:
            step(state, [ROWS[:2], ROWS[:1]], 5)

    seen = list[Any]()
    simulate(1, train)
    assert seen == [(5, 3, [1.0, 1.0]), (5, 3, [1.0])] * 2
    seen.clear()
    simulate(2, train)
    assert sorted(seen) == [(5, 3, [0.0]), *[(5, 3, [1.0])] * 3]


def test_predictions_of_all_samples_leave_out_stand_ins():
    """What `predict` measures among all samples of a batch has no stand-in in it."""

    def measured(world: af.World) -> torch.Tensor:
        def among(model: Any, x: Any, *, sample_weight: Any) -> Any:
            assert len(sample_weight) == len(x)
            return model(x) - af.all_gather(model(x), world).mean(0)

        state = linear(world, (7, 6))
        return torch.stack(list(af.predict(state, state.data, among)))

    for found in simulate(4, measured):
        torch.testing.assert_close(found, measured(ALONE), **CLOSE)


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_real_ranks_gather_uneven_shares():
    """Gloo, which aborts on unequal rows, joins shares of 12 and 11 samples."""
    alone = trained(ALONE, contrastive, None, 23, 23)
    for found in run_ranks(2, trained, contrastive, UNUSED, 23, 23):
        torch.testing.assert_close(found, alone, **CLOSE)


@given(ranks=st.integers(1, 4), parts=st.integers(1, 3), n=st.integers(1, 12))
@settings(max_examples=max(8, settings().max_examples // 10))
def test_tensors_of_samples_are_cut_with_them(ranks: int, parts: int, n: int) -> None:
    """`batch.zip` gives each micro-batch the rows of its own samples."""

    def loss(model: Any, batch: Any) -> Any:
        x, (weight, target) = batch
        return (weight * (model(x) - target).square().sum(1)).mean()

    def train(world: af.World, parts: int) -> torch.Tensor:
        state = linear(world, (n, 5), af.accumulate(num_micro_batches=parts))
        step = af.make_step(loss)
        for batch in af.batches(state, until_epoch=1):
            at = batch.indices
            extra = (ROWS[at, 0].square(), ROWS[at, 1:4])
            state, _ = step(state, batch.zip(extra))
        return state.params["weight"].clone()

    for found in simulate(ranks, lambda world: train(world, parts)):
        torch.testing.assert_close(found, train(ALONE, 1), **CLOSE)


def test_an_extra_with_as_many_rows_as_samples_is_warned_of():
    """Each micro-batch gets all its rows; the warning shows the line to write."""
    state = linear(ALONE, (24, 6), af.accumulate(num_micro_batches=2))
    step = af.make_step(lambda model, x, _: model(x).square().mean())
    batch = next(iter(af.batches(state)))
    with pytest.warns(af.errors.AccelfnWarning, match=r"batch\.zip\(extra\)"):
        step(state.copy(), batch, (ROWS[:6], ROWS[:6, 0]))
    with pytest.raises(
        af.errors.BatchError, match="have 5 rows, but this rank has 6 samples"
    ):
        batch.zip(ROWS[:5])
    assert step(state, batch, {"table": ROWS[:6]})[0].step == 1


def test_the_value_of_an_empty_share_needs_its_batch():
    """Without the batch a stand-in would count as a sample, in another state, too."""

    def train(world: af.World, *, whole: bool) -> torch.Tensor:
        first, other = linear(world, (9, 4)), linear(world)
        step = af.make_step(lambda model, x: model(x).square().mean())
        for batch in af.batches(first, until_epoch=1):
            other, _ = step(other, batch if whole else batch.value)
        return af.full_params(other, at="eval")["weight"]

    for size in (2, 4):
        found = simulate(size, lambda world: train(world, whole=True))[0]
        torch.testing.assert_close(found, train(ALONE, whole=True), **CLOSE)
    with pytest.raises(af.errors.BatchError, match=r"step\(state, batch\)"):
        simulate(2, lambda world: train(world, whole=False))


def test_a_collective_that_ends_a_gradient_is_warned_of():
    """A loss that reduces what requires a gradient trains without it."""
    state = linear(ALONE)

    def loss_fn(model: Any, x: Any, call: Any) -> Any:
        return model(x).square().mean() * call(model(x).mean(0)).sum()

    step = af.make_step(loss_fn)
    for call in (
        lambda z: af.all_reduce(z, ALONE, "mean"),
        lambda z: af.all_gather(z, ALONE),
        lambda z: af.broadcast(z, ALONE),
    ):
        with pytest.warns(af.errors.AccelfnWarning, match=r"grad=True"):
            state, _ = step(state, ROWS, call)
        detached = partial(lambda call, z: call(z.detach()), call)
        state, _ = step(state, ROWS, detached)
