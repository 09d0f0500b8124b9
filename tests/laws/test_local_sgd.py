# SPDX-License-Identifier: Apache-2.0
"""local_sgd is DDP at one end and plain training at the other, and averages by weight."""

import attrs
from hypothesis import given
from hypothesis import strategies as st

import accelfn as af
from accelfn.testing import simulate
from tests.laws.worlds import DDP, Found, alone, params, trained, without_slots
from tests.strategies import Run, differences, runs, tensors


@given(run=runs(optimizer="sgd", remainder="short"), size=st.sampled_from([2, 4]))
def test_every_update_is_ddp_for_sgd(run: Run, size: int) -> None:
    """With sync_every=1 and plain SGD, local SGD gives what DDP gives, uneven shares too."""
    ddp = trained(size, run, DDP)
    local = trained(size, run, af.shard_data(), af.local_sgd(sync_every=1))
    for (one, _), (two, _) in zip(ddp, local, strict=True):
        assert differences(params(one[-1]), params(two[-1]), within=1e-9) == []


def test_for_adam_it_differs_from_ddp() -> None:
    """For Adam the two are different algorithms, and differ."""
    run = Run(n=8, optimizer="adamw", dyadic=False, loss="squared", updates=2)
    (ddp, _), _ = trained(2, run, DDP)
    (local, _), _ = trained(2, run, af.shard_data(), af.local_sgd(sync_every=1))
    assert "params.head.weight" in differences(ddp[-1], local[-1], within=1e-9)


@given(run=runs(optimizer="adamw", updates=3), every=st.integers(1, 4))
def test_alone_it_is_plain_training(run: Run, every: int) -> None:
    """In a world of 1 local SGD changes nothing, bitwise."""
    expected, _ = alone(run)
    found, _ = alone(run, af.local_sgd(sync_every=every))
    assert differences(expected[-1], without_slots(found[-1])) == []


@given(
    every=st.integers(1, 3),
    updates=st.integers(1, 4),
    size=st.sampled_from([2, 3]),
    buffers=st.booleans(),
    opt_state=st.booleans(),
    optimizer=st.sampled_from(["sgd", "momentum", "adamw"]),
)
def test_it_communicates_when_it_says(
    every: int,
    updates: int,
    size: int,
    buffers: bool,
    opt_state: bool,
    optimizer: str,
) -> None:
    """One flattened all-reduce every sync_every updates, none between; replicas agree after."""
    setup = af.chain(
        af.shard_data(),
        af.local_sgd(sync_every=every, buffers=buffers, opt_state=opt_state),
    )
    run = Run(n=24, batch_size=12, updates=updates, kind="norm", optimizer=optimizer)
    run = attrs.evolve(run, dyadic=False, loss="squared", setup=setup)
    log = simulate(size, lambda world: run.train(run.state(world))).log
    said = [(e.kind, e.label) for e in log if not e.label.startswith("compare ")]
    assert said == [("all_reduce", "local_sgd")] * (updates // every)
    averaging = [each.step for each in log if each.label == "local_sgd"]
    assert averaging == list(range(every - 1, updates, every))
    (first, _), *others = trained(size, run, setup)
    for i in range(updates):
        for second, _ in others:
            apart = {path.split(".")[0] for path in differences(first[i], second[i])}
            apart -= {"slots"}
            if (i + 1) % every:
                assert "params" in apart
            else:
                assert "params" not in apart
                assert ("buffers" in apart) is not buffers
                assert ("opt_state" in apart) is (not opt_state and optimizer != "sgd")


@given(run=runs(updates=3), size=st.sampled_from([2, 3]), weighted=st.booleans())
def test_a_last_average_is_owed(run: Run, size: int, weighted: bool) -> None:
    """finalize and eval_params give the mean over ranks, by the weight of what each saw."""
    setup = af.chain(af.shard_data(), af.local_sgd(sync_every=4))
    loss = "weighted" if weighted else "mean"
    run = attrs.evolve(run, setup=setup, dyadic=False, loss=loss)

    def seen(world: af.World) -> float:
        """Return the weight of the samples of this rank's batches."""
        total, batches = 0.0, iter(af.batches(run.state(world)))
        for _ in range(run.updates):
            batch = next(batches)
            for (_, y), weight in zip(batch.micro_batches, batch.weights, strict=True):
                total += float(y[:weight, 0].abs().sum()) if weighted else weight
        return total

    def finish(world: af.World) -> tuple[Found, Found, Found, Found]:
        state, _ = run.train(run.state(world))
        before = tensors(state)
        view = {f"params.{n}": p.clone() for n, p in af.eval_params(state).items()}
        still = tensors(state)
        return before, still, view, params(tensors(af.finalize(state)))

    weights = list(simulate(size, seen))
    results = simulate(size, finish)
    parts = [params(before) for before, *_ in results]
    if not any(weights):
        weights = [1.0] * size  # nothing was seen: the plain mean
    mean = {
        path: sum(w * part[path] for w, part in zip(weights, parts, strict=True))
        / sum(weights)
        for path in parts[0]
    }
    for before, still, view, after in results:
        assert differences(before, still) == []
        assert differences(mean, view, within=1e-12) == []
        assert differences(mean, after, within=1e-12) == []
