# SPDX-License-Identifier: Apache-2.0
"""N ranks = 1 rank = k micro-batches, on real Gloo processes: exact on dyadic data."""

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import accelfn as af
from tests.processes import run_ranks
from tests.ranks import programs
from tests.strategies import LOSSES, Run, differences, runs, tensors

pytestmark = pytest.mark.ranks(2)

DDP = af.chain(af.shard_data(), af.wrap_ddp())
worlds = st.sampled_from([1, 2, 2, 4])
options = st.fixed_dictionaries(
    {
        "gradient_as_bucket_view": st.booleans(),
        "bucket_cap_mb": st.sampled_from([25, 1e-5]),
        "find_unused_parameters": st.booleans(),
    }
)


def alone(run: Run) -> tuple[list[dict], list[dict[str, float]]]:
    """Train in this process with no transform that splits anything."""
    world = af.World.single(device="cpu")
    state, states, means = run.state(), [], []
    for _ in range(run.updates):
        state, metrics = run.train(state, 1)
        states.append(tensors(state))
        means.append(af.mean(metrics[0], world))
    return states, means


def close_means(one: dict[str, float], two: dict[str, float]) -> bool:
    scale = {name: max(1.0, abs(one[name])) for name in one}
    return one.keys() == two.keys() and all(
        abs(one[name] - two[name]) <= 1e-9 * scale[name] for name in one
    )


@given(
    run=runs(optimizer="sgd", dyadic=True, updates=1, kind="plain"),
    size=worlds,
    parts=st.integers(1, 5),
    ddp=options,
)
def test_ranks_and_micro_batches_are_exactly_neutral(
    run: Run, size: int, parts: int, ddp: dict
) -> None:
    """On dyadic data the update is bitwise that of one process on the whole batch."""
    batch_size = 2 ** (run.batch_size % 4)
    run = attrs.evolve(
        run, batch_size=batch_size, remainder="drop", n=max(run.n, batch_size)
    )
    # squared errors divide by the number of elements: not exact
    run = attrs.evolve(run, loss="mean", schedule=False)
    expected, _ = alone(run)
    split = attrs.evolve(
        run,
        setup=af.chain(
            af.shard_data(), af.wrap_ddp(**ddp), af.accumulate(num_micro_batches=parts)
        ),
    )
    for states, _ in run_ranks(size, programs.train, split):
        assert differences(expected[0], states[0]) == []


@given(run=runs(), size=worlds, parts=st.integers(1, 4), ddp=options)
def test_ranks_and_micro_batches_are_neutral_up_to_rounding(
    run: Run, size: int, parts: int, ddp: dict
) -> None:
    """Uneven and empty shares, short batches, weighted losses, any optimizer: one result."""
    expected, expected_means = alone(run)
    setup = af.chain(
        af.shard_data(), af.wrap_ddp(**ddp), af.accumulate(num_micro_batches=parts)
    )
    split = attrs.evolve(run, setup=setup)
    per_rank = run_ranks(size, programs.train, split)
    for states, means in per_rank:
        assert differences(expected[-1], states[-1], within=1e-9) == []
        assert all(map(close_means, expected_means, means))
        assert (
            differences(per_rank[0][0][-1], states[-1]) == []
        )  # replicas agree, bitwise


@given(run=runs(dyadic=False), micro=st.integers(1, 9), parts=st.integers(1, 5))
def test_micro_batches_alone(run: Run, micro: int, parts: int) -> None:
    """In one process, any number or size of micro-batches gives the whole batch's step."""
    expected, expected_means = alone(run)
    for setup in (
        af.accumulate(micro_batch_size=micro),
        af.accumulate(num_micro_batches=parts),
    ):
        states, means = alone(attrs.evolve(run, setup=setup))
        assert differences(expected[-1], states[-1], within=1e-9) == []
        assert all(map(close_means, expected_means, means))


@given(run=runs(updates=1), size=st.sampled_from([2, 4]), parts=st.integers(1, 3))
def test_accumulating_by_hand(run: Run, size: int, parts: int) -> None:
    """into= with sync= on the last, or sync_grads after all, give the step's own result."""
    setup = af.chain(DDP, af.accumulate(num_micro_batches=parts))
    split = attrs.evolve(run, setup=setup)
    stepped = run_ranks(size, programs.train, split)
    for rank, (by_flags, by_call) in enumerate(
        run_ranks(size, programs.custom_accumulation, split)
    ):
        assert differences(stepped[rank][0][0], by_flags) == []
        assert differences(stepped[rank][0][0], by_call, within=1e-12) == []


@settings(max_examples=10)
@given(
    run=runs(n=12, dyadic=True, loss="mean", optimizer="sgd", kind="plain", updates=1)
)
def test_three_ranks(run: Run) -> None:
    """Three ranks, whose count is no power of two, agree with one up to the last bits."""
    expected, _ = alone(run)
    for states, _ in run_ranks(3, programs.train, attrs.evolve(run, setup=DDP)):
        assert differences(expected[0], states[0], within=1e-14) == []


@given(run=runs(remainder="short"), size=st.sampled_from([2, 4]))
def test_local_sgd_every_update_is_ddp_for_sgd(run: Run, size: int) -> None:
    """With sync_every=1 and plain SGD, local SGD gives what DDP gives, uneven shares too."""
    run = attrs.evolve(run, optimizer="sgd")
    ddp = run_ranks(size, programs.train, attrs.evolve(run, setup=DDP))
    setup = af.chain(af.shard_data(), af.local_sgd(sync_every=1))
    local = run_ranks(size, programs.train, attrs.evolve(run, setup=setup))
    for pair in zip(ddp, local, strict=True):
        one, two = (
            {k: v for k, v in states[-1].items() if k.startswith("params")}
            for states, _ in pair
        )
        assert differences(one, two, within=1e-9) == []


def test_local_sgd_differs_from_ddp_for_adam() -> None:
    """For Adam the two are different algorithms, and differ."""
    run = Run(n=8, optimizer="adamw", dyadic=False, loss="squared", updates=2)
    setup = af.chain(af.shard_data(), af.local_sgd(sync_every=1))
    ddp = run_ranks(2, programs.train, attrs.evolve(run, setup=DDP))
    local = run_ranks(2, programs.train, attrs.evolve(run, setup=setup))
    assert "params.head.weight" in differences(
        ddp[0][0][-1], local[0][0][-1], within=1e-9
    )


@given(run=runs(optimizer="adamw", updates=3), every=st.integers(1, 4))
def test_local_sgd_alone_is_plain_training(run: Run, every: int) -> None:
    """In a world of 1 local SGD changes nothing, bitwise."""
    expected, _ = alone(run)
    found, _ = alone(attrs.evolve(run, setup=af.local_sgd(sync_every=every)))
    kept = {k: v for k, v in found[-1].items() if not k.startswith("slots")}
    assert differences(expected[-1], kept) == []


@given(
    every=st.integers(1, 3),
    updates=st.integers(1, 4),
    buffers=st.booleans(),
    opt_state=st.booleans(),
    optimizer=st.sampled_from(["sgd", "momentum", "adamw"]),
)
def test_local_sgd_communicates_when_it_says(
    every: int,
    updates: int,
    buffers: bool,
    opt_state: bool,
    optimizer: str,
) -> None:
    """One flattened all-reduce every sync_every updates, none between; replicas agree after."""
    setup = af.chain(
        af.shard_data(),
        af.local_sgd(sync_every=every, buffers=buffers, opt_state=opt_state),
    )
    run = Run(n=16, batch_size=8, updates=updates, kind="norm", optimizer=optimizer)
    run = attrs.evolve(run, setup=setup, dyadic=False, loss="squared")
    counts = run_ranks(2, programs.count_collectives, run)
    assert counts[0] == [
        [counts[0][i][0]] if (i + 1) % every == 0 else [] for i in range(updates)
    ]
    first, second = (states for states, _ in run_ranks(2, programs.train, run))
    for i in range(updates):
        apart = {path.split(".")[0] for path in differences(first[i], second[i])}
        apart -= {"slots"}
        if (i + 1) % every:
            assert "params" in apart
        else:
            assert "params" not in apart
            assert ("buffers" in apart) is not buffers
            assert ("opt_state" in apart) is (not opt_state and optimizer != "sgd")


@given(updates=st.integers(1, 5), optimizer=st.sampled_from(["sgd", "adamw"]))
def test_local_sgd_owes_a_last_average(updates: int, optimizer: str) -> None:
    """finalize and eval_params give the mean over ranks, by weight; the latter changes nothing."""
    run = Run(n=24, batch_size=7, updates=updates, optimizer=optimizer, dyadic=False)
    setup = af.chain(af.shard_data(), af.local_sgd(sync_every=3))
    run = attrs.evolve(run, setup=setup, loss="squared")
    results = run_ranks(2, programs.train_and_finalize, run)
    asked = run_ranks(2, programs.eval_params, run)
    weights = [float(before["slots.local_sgd.weight"]) for before, _ in results]
    for path in [p for p in results[0][0] if p.startswith("params")]:
        parts = [before[path] for before, _ in results]
        if sum(weights):
            mean = sum(w * p for w, p in zip(weights, parts, strict=True)) / sum(
                weights
            )
        else:
            mean = parts[0]
        for (_, after), (view, before, still) in zip(results, asked, strict=True):
            torch.testing.assert_close(after[path], mean, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(view[path], mean, rtol=1e-12, atol=1e-12)
            assert differences(before, still) == []


@given(
    run=runs(updates=2), size=st.sampled_from([1, 2, 4]), batch_size=st.integers(1, 9)
)
def test_evaluation_sees_each_sample_once(run: Run, size: int, batch_size: int) -> None:
    """evaluate and predict give one process's result for any world and batch size."""
    state, _ = run.train(run.state())
    x, y = run.dataset()
    with af.bind(state) as net, torch.no_grad():
        expected = net(x)
        whole = LOSSES[run.loss](net, (x, y))
    if run.loss == "weighted":
        whole = whole.total / whole.weight if whole.weight else whole.weight
    loss = float(whole)
    trained = attrs.evolve(run, setup=DDP)
    for means, rows, same in run_ranks(size, programs.evaluate, trained, batch_size):
        assert same
        assert abs(means["loss"] - loss) <= 1e-9 * max(1.0, abs(loss))
        found = torch.stack([row["out"] for row in rows])
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_collectives_of_ddp() -> None:
    """Options of wrap_ddp reach DistributedDataParallel, each of them."""
    default = run_ranks(2, programs.ddp_options, af.wrap_ddp())[0]
    changed = {
        "bucket_cap_mb": 1.5,
        "gradient_as_bucket_view": False,
        "find_unused_parameters": True,
        "static_graph": True,
        "forward_sync_buffers": False,
    }
    assert default.keys() == {*changed, "init_sync"}
    for option, value in changed.items():
        seen = run_ranks(2, programs.ddp_options, af.wrap_ddp(**{option: value}))[0]
        assert seen == {**default, option: value}


def test_a_profiler_sees_ddp_and_changes_nothing() -> None:
    """DDP's own record is left out only while no profiler looks."""
    run = attrs.evolve(Run(), setup=DDP)
    for seen, plain, watched in run_ranks(2, programs.under_a_profiler, run):
        assert "DistributedDataParallel.forward" in seen
        assert plain.keys() == watched.keys()
        assert all(torch.equal(plain[name], watched[name]) for name in plain)


@pytest.mark.parametrize("optimizer", ["AdamW", "Adam", "SGD", "Adagrad"])
def test_fused_optimizers_divide_alike(optimizer: str) -> None:
    """Where torch's fused kernel divides by the weight, the update is the divided one's."""
    for agree, _ in run_ranks(2, programs.fused_division, optimizer):
        assert agree
