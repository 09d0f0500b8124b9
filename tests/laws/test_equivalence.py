# SPDX-License-Identifier: Apache-2.0
"""N ranks = 1 rank = k micro-batches: exactly on dyadic data, and up to rounding."""

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import accelfn as af
from accelfn.testing import simulate
from tests.laws.worlds import DDP, Found, alone, close_means, trained
from tests.strategies import (
    LOSSES,
    Run,
    differences,
    runs,
    tensors,
    weighted_loss,
)

worlds = st.sampled_from([1, 2, 4])
options = st.fixed_dictionaries(
    {
        "gradient_as_bucket_view": st.booleans(),
        "bucket_cap_mb": st.sampled_from([25, 1e-5]),
        "find_unused_parameters": st.booleans(),
    }
)
Pair = tuple[torch.Tensor, torch.Tensor]
BEHIND = [af.clip_grad_norm(0.5), af.clip_grad_value(0.25), af.ema(0.5)]
"""Transforms of what is reduced; none of them may see how a batch was split."""
behind = st.lists(st.sampled_from(BEHIND), unique=True)


def exact(run: Run) -> Run:
    """Return the run with every sum of its update exact in any order."""
    size = 2 ** (run.batch_size % 4)
    # squared errors divide by the number of elements: not exact
    return attrs.evolve(
        run,
        batch_size=size,
        n=max(run.n, size),
        remainder="drop",
        loss="mean",
        schedule=False,
    )


@given(
    run=runs(optimizer="sgd", dyadic=True, updates=1, kind="plain").map(exact),
    size=worlds,
    parts=st.integers(1, 5),
    ddp=options,
)
def test_ranks_and_micro_batches_are_exactly_neutral(run, size, parts, ddp):
    """On dyadic data the update is bitwise that of one process on the whole batch."""
    expected, _ = alone(run)
    split = [
        af.shard_data(),
        af.wrap_ddp(**ddp),
        af.accumulate(num_micro_batches=parts),
    ]
    for states, _ in trained(size, run, *split):
        assert differences(expected[0], states[0]) == []


@given(
    run=runs(),
    size=worlds,
    parts=st.integers(1, 4),
    ddp=options,
    then=behind,
)
def test_ranks_and_micro_batches_are_neutral_up_to_rounding(
    run, size, parts, ddp, then
):
    """Uneven and empty shares, short batches, weighted losses, any optimizer: one result."""
    expected, expected_means = alone(run, *then)
    split = [
        af.shard_data(),
        af.wrap_ddp(**ddp),
        af.accumulate(num_micro_batches=parts),
    ]
    (first, _), *_ = per_rank = trained(size, run, *split, *then)
    for states, means in per_rank:
        assert differences(expected[-1], states[-1], within=1e-9) == []
        assert all(map(close_means, expected_means, means))
        assert differences(first[-1], states[-1]) == []  # replicas agree, bitwise


def by_hand(world: af.World, run: Run, how: str) -> Found:
    """Add up micro-batches' gradients; reduce with the last, by sync_grads, or always."""
    state = run.state(world)
    compute = af.value_and_grad(LOSSES[run.loss])
    grads = None
    parts = next(iter(af.batches(state))).parts()
    for part in parts:
        sync = how == "always" or (how == "last" and part is parts[-1])
        _, grads = compute(state, part, into=grads, sync=sync)
    if how == "sync_grads":
        grads = af.sync_grads(state, grads)
    return tensors(af.apply_grads(state, grads))


@given(run=runs(updates=1), size=worlds, parts=st.integers(1, 3))
def test_adding_what_is_a_mean_already(run: Run, size: int, parts: int) -> None:
    """Where nothing is reduced, into= may add to what was taken with sync=True."""
    local = af.chain(af.shard_data(), af.local_sgd(sync_every=2))
    run = attrs.evolve(
        run, setup=af.chain(local, af.accumulate(num_micro_batches=parts))
    )
    stepped = trained(size, run, run.setup)
    found = simulate(size, lambda world: by_hand(world, run, "always"))
    for (states, _), one in zip(stepped, found, strict=True):
        assert differences(states[0], one, within=1e-12) == []


@given(run=runs(updates=1), size=st.integers(2, 3))
def test_what_would_drift_is_refused(run: Run, size: int) -> None:
    """Adding to reduced gradients, and applying what nothing has reduced, say what to do."""
    run = attrs.evolve(run, setup=af.chain(DDP, af.accumulate(num_micro_batches=2)))
    with pytest.raises(
        af.errors.GradsError, match="are already reduced over the ranks"
    ):
        simulate(size, lambda world: by_hand(world, run, "always"))
    with pytest.raises(af.errors.GradsError, match=r"not reduced.*wrap_ddp"):
        simulate(size, lambda world: by_hand(world, run, "never"))
    with pytest.raises(af.errors.GradsError, match=r"not reduced.*wrap_ddp"):
        trained(size, run, af.shard_data())


@given(run=runs(), size=worlds, power=st.integers(-8, 8), parts=st.integers(1, 3))
def test_the_unit_of_weights_does_not_matter(run, size, power, parts):
    """Totals and weights, both times a power of two, give bitwise the same update."""
    setup = af.chain(DDP, af.accumulate(num_micro_batches=parts))
    run = attrs.evolve(run, setup=setup)

    def in_units_of(unit: float) -> object:
        def loss(net: torch.nn.Module, batch: Pair) -> af.Loss:
            given = weighted_loss(net, batch)
            return af.Loss(given.total * unit, given.weight * unit)

        def train(world: af.World) -> Found:
            state = run.state(world)
            step, batches = af.make_step(loss), iter(af.batches(state))
            for _ in range(run.updates):
                state, _ = step(state, next(batches))
            return tensors(state)

        return train

    expected, found = (
        simulate(size, in_units_of(1)),
        simulate(size, in_units_of(2.0**power)),
    )
    for one, two in zip(expected, found, strict=True):
        assert differences(one, two) == []


@given(
    run=runs(updates=2), size=st.sampled_from([1, 2, 4]), batch_size=st.integers(1, 9)
)
def test_evaluation_sees_each_sample_once(run: Run, size: int, batch_size: int) -> None:
    """evaluate and predict give one process's result for any world and batch size."""
    state, _ = run.train(run.state())
    x, y = run.dataset()
    with af.borrow_model(state) as net, torch.no_grad():
        expected = net(x)
        whole = LOSSES[run.loss](net, (x, y))
    if run.loss == "weighted":
        whole = whole.total / whole.weight if whole.weight else whole.weight
    loss = float(whole)

    def evaluate(world: af.World) -> None:
        state, _ = run.train(attrs.evolve(run, setup=DDP).state(world))
        data = af.Data(run.dataset(), global_batch_size=batch_size)
        before, generator = tensors(state), torch.get_rng_state()
        means = af.evaluate(state, data, LOSSES[run.loss])
        assert abs(means["loss"] - loss) <= 1e-9 * max(1.0, abs(loss))
        outputs = list(af.predict(state, data, lambda net, batch: net(batch[0])))
        torch.testing.assert_close(torch.stack(outputs), expected, rtol=1e-9, atol=1e-9)
        assert differences(before, tensors(state)) == []
        assert torch.equal(generator, torch.get_rng_state())

    simulate(size, evaluate)
