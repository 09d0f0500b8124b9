# SPDX-License-Identifier: Apache-2.0
"""What calls are given, and the caller may write to again; nothing made of it changes by that."""

import math
import tempfile
from collections.abc import Callable
from functools import partial
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
from tests.laws.sharing import (
    SETUPS,
    Counted,
    Scene,
    fields,
    in_common,
    ruin,
    spans,
    stored,
    tensors_in,
    undisturbed,
)
from tests.states import bits, values

SIZES = st.sampled_from([2, 1])
SEEDS = st.integers(0, 3)
NAMED = st.sampled_from(sorted(SETUPS))

TABLE = torch.linspace(-1, 1, 12).reshape(4, 3)
STILL = torch.ones(2)


class Vectors(nn.Module):
    """Around what was there before: a table that is trained, and a constant that is written."""

    def __init__(self, table: torch.Tensor, still: torch.Tensor) -> None:
        super().__init__()
        self.table = nn.Embedding.from_pretrained(table, freeze=False)
        self.both = nn.Linear(1, 1, bias=False)
        self.register_buffer("still", still)
        self.register_buffer("seen", still[1:])

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        self.seen.add_(1)
        return (self.table(index) * self.both.weight).sum(-1) + self.still[0]


@given(
    instance=st.booleans(),
    shared=st.sets(st.sampled_from(["table", "still"])),
    seed=SEEDS,
    updates=st.integers(1, 3),
)
def test_memory_that_others_hold_is_copied(instance, shared, seed, updates):
    """L22: a state trains no table, constant or state dict that its model was made around."""
    table, still = TABLE.clone(), STILL.clone()
    before = table.clone(), still.clone()

    def made() -> nn.Module:
        return Vectors(
            table if "table" in shared else table.clone(),
            still if "still" in shared else still.clone(),
        )

    first = made() if instance else made
    held = first.state_dict() if instance else {}
    as_given = bits(held)
    sgd = partial(torch.optim.SGD, lr=0.5)
    one, other = (
        af.TrainState.create(model=source, optimizer=sgd, seed=seed)
        for source in (first, made)
    )
    assert in_common(fields(one), fields(other)) == 0
    start = values(other)
    step = af.make_step(lambda model, index: model(index).square().mean())
    for _ in range(updates):
        one, _ = step(one, torch.arange(4))
    assert start == values(other)
    assert as_given == bits(held)
    assert torch.equal(before[0], table)
    assert torch.equal(before[1], still)
    assert start["params"] != values(one)["params"]
    assert float(one.buffers["seen"][0]) == 1 + updates


def test_what_nobody_else_holds_is_not_copied():
    """L22: parameters of a model that is given away keep their memory."""
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    places = set(spans(dict(model.named_parameters())))
    state = af.TrainState.create(
        model=model, optimizer=partial(torch.optim.SGD, lr=0.5)
    )
    assert places == set(spans(dict(state.params)))


LOSSES: dict[str, Callable[[Any, Any], Any] | None] = {
    "counted": None,
    "computed": lambda model, batch: model(batch[0]).square().mean(),
    "a parameter": lambda model, _: model.scale,
    "a view of one": lambda model, _: model.inner.weight[1, 2],
    "a total that is one": lambda model, _: af.Loss(model.inner.bias[0], 2),
}


@pytest.mark.parametrize("kind", LOSSES)
@given(
    setup=NAMED, how=st.sampled_from(["step", "gradients"]), updates=st.integers(1, 3)
)
def test_metrics_stay_what_they_were(kind, setup, how, updates):
    """L34: those that are kept change with no parameter, buffer or counter, nor with who reads."""
    scene = Scene.of(af.World.single(device="cpu"), setup, updates=0)
    kept: list[tuple[Any, Any]] = []
    loss = LOSSES[kind] or scene.loss
    state, step = scene.state, af.make_step(loss)
    for _ in range(updates):
        batch = next(iter(af.batches(state)))
        if how == "gradients":
            metrics, grads = af.value_and_grad(loss)(state, batch)
            state = af.apply_grads(state, grads)
        else:
            state, metrics = step(state, batch)
        kept.append((metrics, {name: float(metrics[name]) for name in metrics}))
        for name in metrics:
            metrics[name].add_(1)
    for metrics, before in kept:
        assert before == {name: float(metrics[name]) for name in metrics}
    total = sum(metrics for metrics, _ in kept)
    seen = [each for _, found in kept for each in found.values()]
    if kind == "counted" and not any(map(math.isnan, seen)):
        scales = [before["scale"] for _, before in kept]
        assert float(total["scale"]) == pytest.approx(sum(scales) / len(scales))


@given(batch_size=st.integers(1, 6))
def test_a_measure_may_count_in_place(batch_size: int) -> None:
    """L34: what evaluation adds up are the values that its function had at the time."""
    scene = Scene.of(af.World.single(device="cpu"), "none", updates=0)
    rows = [torch.ones(12, 3), torch.ones(12, 2)]
    data = af.Data(tuple(rows), global_batch_size=batch_size)
    found = af.evaluate(scene.state, data, Counted())
    sizes = [min(batch_size, 12 - at) for at in range(0, 12, batch_size)]
    calls = sum(range(1, len(sizes) + 1))
    assert found["calls"] == pytest.approx(calls / 12)


@given(total=st.integers(-3, 3), weight=st.integers(1, 3), other=st.integers(1, 3))
def test_metrics_have_their_own_numbers(total: int, weight: int, other: int) -> None:
    """L34: what they are made of may be written to, and what is read of them."""
    amount, over = torch.tensor(float(total)), torch.tensor(float(weight))
    sums = {"loss": (amount, over)}
    metrics = af.Metrics(sums)
    amount.add_(other)
    over.add_(other)
    sums.clear()
    assert float(metrics["loss"]) == pytest.approx(total / weight)
    added = metrics + metrics
    metrics["loss"].add_(1)
    assert float(added["loss"]) == pytest.approx(total / weight)


@given(
    setup=NAMED,
    which=st.sets(st.sampled_from(["inner.weight", "scale", "norm.bias"])),
    view=st.booleans(),
)
def test_gradients_that_are_the_same_are_given_away_together(setup, which, view):
    """L22: `map` gives copies apart, and together what lies in the memory of the given ones."""
    scene = Scene.of(af.World.single(device="cpu"), setup, updates=0)
    fork = scene.state.copy()
    _, grads = af.value_and_grad(scene.loss)(scene.state, scene.batch)
    names = {id(each): name for name, each in grads.tensors.items()}
    before = bits(dict(grads.tensors))

    def fn(grad: torch.Tensor) -> torch.Tensor:
        if names[id(grad)] not in which:
            return grad.clone()
        return grad.view_as(grad) if view else grad

    af.apply_grads(scene.state, grads.map(fn))
    if which:
        with pytest.raises(af.errors.GradsError, match="passed to af.apply_grads"):
            af.apply_grads(fork, grads)
    else:
        assert before == bits(dict(grads.tensors))
        af.apply_grads(fork, grads)


def of_join() -> tuple[Any, Any, Any]:
    parts = [(2, af.schedules.constant(0.5)), af.schedules.constant(1.0)]
    made = af.schedules.join(*parts)
    return parts, made, lambda: [made(step) for step in range(4)]


def of_data(make: Callable[[Any], af.Data], given: Any) -> tuple[Any, Any, Any]:
    data = make(given)

    def look() -> Any:
        return [data.num_updates(1), *map(str, indices_of(data))]

    return given, data, look


def indices_of(data: af.Data) -> list[Any]:
    state = af.TrainState.create(
        model=partial(nn.Linear, 1, 1),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        data=data,
    )
    return [batch.indices.tolist() for batch in af.batches(state, until_epoch=2)]


def record(make: Callable[[Any], Any], given: Any) -> tuple[Any, Any, Any]:
    made = make(given)
    return given, made, lambda: repr(made)


def of_groups() -> tuple[Any, Any, Any]:
    model, rate = nn.Linear(2, 2), torch.tensor(0.5)
    groups = [{"params": [p], "lr": rate} for p in model.parameters()]
    make = torch.optim.SGD(groups, lr=0.1, momentum=0.5)
    state = af.TrainState.create(model=model, optimizer=make)
    return [rate, groups], state, lambda: state.lrs


GIVEN: dict[str, Callable[[], tuple[Any, Any, Any]]] = {
    "neighbours of local_sgd": lambda: record(
        lambda given: af.local_sgd(sync_every=4, neighbours=given), {2: 2}
    ),
    "options of compile": lambda: record(
        lambda given: af.compile(options=given), {"max_autotune": False}
    ),
    "a plan of tensor_parallel": lambda: record(
        lambda given: af.tensor_parallel(plan=given), {"inner": "column"}
    ),
    "rates of plateau": lambda: record(
        lambda given: af.reduce_lr_on_plateau(min_lr=given), [0.5, 0.25]
    ),
    "budgets of a device map": lambda: record(
        lambda given: af.plan_devices(nn.Linear(2, 2), budgets=given), {"cpu": 1000}
    ),
    "transforms of a chain": lambda: record(
        lambda given: af.chain(*given), [af.ema(0.5), af.clip_grad_norm(0.5)]
    ),
    "parts of a schedule": of_join,
    "weights of samples": lambda: of_data(
        lambda given: af.Data(
            range(8), global_batch_size=3, order=af.orders.weighted(given.numpy())
        ),
        torch.arange(1.0, 9).double(),
    ),
    "lengths of samples": lambda: of_data(
        lambda given: af.Data(
            range(8),
            global_batch_size=2,
            order=af.orders.bucketed(given.numpy(), window=8),
        ),
        torch.arange(8),
    ),
    "costs of samples": lambda: of_data(
        lambda given: af.Data(
            range(8),
            global_batch_size=af.token_budget(given.numpy(), limit=4),
            shuffle=True,
        ),
        torch.ones(8).long(),
    ),
    "a mix": lambda: of_data(
        lambda given: af.Data.mix(given[0], weights=given[1], global_batch_size=4),
        [[range(6), range(6)], [1, 2]],
    ),
    "groups of an optimizer": of_groups,
}
"""What records and definitions are made of: (what was given, what it made, a look at that)."""


@pytest.mark.parametrize("what", GIVEN)
def test_what_was_given_may_change(what):
    """L22: what a record was made of is checked once, and is its own from then on."""
    held, made, look = GIVEN[what]()
    before = look()
    ruin(held)
    assert before == look()
    assert made is not None


FORMS: dict[str, Callable[[torch.Tensor], Any]] = {
    "a tensor": lambda rows: rows,
    "a tuple": lambda rows: (rows, rows[:, 0]),
    "a dict": lambda rows: {"x": rows, "y": rows[:, 1]},
    "an array": lambda rows: rows.numpy(),
    "a list": lambda rows: [*rows],
    "a subset": lambda rows: torch.utils.data.Subset(
        torch.utils.data.TensorDataset(rows), range(7)
    ),
}


@given(
    form=st.sampled_from(sorted(FORMS)),
    shuffle=st.booleans(),
    batch_size=st.integers(1, 9),
    parts=st.integers(1, 3),
)
def test_who_writes_to_a_batch_leaves_the_data(form, *, shuffle, batch_size, parts):
    """L22: a batch has rows of its own: neither the dataset nor another batch changes with it."""
    rows = torch.arange(14.0).reshape(7, 2)
    data = af.Data(FORMS[form](rows), global_batch_size=batch_size, shuffle=shuffle)
    state = af.TrainState.create(
        model=partial(nn.Linear, 2, 1),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        data=data,
        setup=af.accumulate(num_micro_batches=parts),
    )
    expected = [bits(list(b.micro_batches)) for b in af.batches(state, until_epoch=2)]
    found = []
    for batch in af.batches(state, until_epoch=2):
        found.append(bits(list(batch.micro_batches)))
        for each in tensors_in(list(batch.micro_batches)):
            each.fill_(99)
    assert expected == found
    assert torch.equal(torch.arange(14.0).reshape(7, 2), rows)


WRITTEN = "batch", "extras", "template", "saved behind its back", "sent"


@pytest.mark.parametrize("what", WRITTEN)
@given(size=SIZES, setup=NAMED)
def test_what_a_call_was_given_is_the_callers_again(what, size, setup):
    """L22: when a call has returned, nothing of what it gave reads what it was given."""

    twins = undisturbed(size, setup, 1)

    def rank(world: af.World) -> None:
        scene, expected = Scene.of(world, setup, updates=1), twins[world.rank]
        if what in ("batch", "extras"):
            batch = scene.batch
            more = {"a": [torch.ones(2)], "b": torch.ones(1)}
            state, metrics = af.make_step(scene.loss)(scene.state, batch, more)
            kept = bits({name: metrics[name] for name in metrics})
            ruin(more)
            ruin([list(each) for each in batch.micro_batches])
            assert kept == bits({name: metrics[name] for name in metrics})
            scene = attrs.evolve(scene, state=state)
            assert expected == values(scene.trained(1))
        elif what == "template":
            made = stored(scene, lambda path: af.load(scene.state, path), af.save)
            ruin([fields(scene.state)[name] for name in ("params", "buffers", "slots")])
            assert expected == values(attrs.evolve(scene, state=made).trained(2))
        elif what == "sent":
            given = {name: each.clone() for name, each in scene.state.params.items()}
            given["alone"] = torch.ones(2, dtype=torch.float64)  # of its dtype
            now = af.all_reduce(given, world, "mean")
            pending = af.start_all_reduce(given, world, "mean")
            ruin(given)
            assert bits(now) == bits(pending.wait())
        else:
            saved_behind_its_back(scene, expected)

    simulate(size, rank)


def saved_behind_its_back(scene: Scene, expected: Any) -> None:
    """Let a save begin, overwrite the state, and train on from what was saved."""
    made = tempfile.mkdtemp() if scene.world.is_main else None
    folder = af.broadcast_object(made, scene.world)
    template = scene.state.copy()
    with af.CheckpointStore(Path(folder), async_=True) as store:
        store.save(scene.state)
        ruin(fields(scene.state))
    with af.CheckpointStore(Path(folder)) as store:
        state = store.restore(template)
    assert expected == values(attrs.evolve(scene, state=state).trained(2))
