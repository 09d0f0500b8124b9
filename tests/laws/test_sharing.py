# SPDX-License-Identifier: Apache-2.0
"""Who holds what: with whom the results of public calls share memory, and what calls are given.

Each row of a table is a call. What it gives is apart from the state, or lent: by where tensors
lie, and by consequence. Who has a result overwrites it, and the state trains on as its twin; the
state trains on, and the result stays.
"""

import copy
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
from accelfn.testing.strategies.chains import chains
from tests.laws.sharing import (
    SETUPS,
    Counted,
    Net,
    Scene,
    containers_in,
    fields,
    in_common,
    module_of,
    ruin,
    spans,
)
from tests.states import bits, values
from tests.strategies import Run

SIZES = st.sampled_from([1, 2])
SEEDS = st.integers(0, 3)
UPDATES = st.integers(0, 3)
NAMED = st.sampled_from(sorted(SETUPS))


def stored(scene: Scene, read: Callable[[str], Any], save: Callable[..., Any]) -> Any:
    """Return what is read of what is saved in a directory that all ranks see."""
    made = tempfile.mkdtemp() if scene.world.is_main else None
    parent = af.broadcast_object(made, scene.world)
    save(scene.state, f"{parent}/saved")
    found = read(f"{parent}/saved")
    af.barrier(scene.world)
    return found


def loaded(scene: Scene) -> Any:
    state = scene.state
    return stored(scene, lambda path: fields(af.load(state, path)), af.save)


def loaded_in_part(scene: Scene) -> Any:
    def read(path: str) -> Any:
        return fields(af.load_part(scene.state, path, ["params", "step"]).state)

    return stored(scene, read, af.save)


def imported(scene: Scene) -> Any:
    return stored(
        scene,
        lambda path: module_of(af.import_model(Net(), path)),
        partial(af.export_model, at="train"),
    )


def gradients(scene: Scene, compute: Any = None) -> Any:
    metrics, grads = (compute or af.value_and_grad(scene.loss))(
        scene.state, scene.batch
    )
    return [dict(grads.tensors), dict(grads.buffers), metrics, dict(grads.metrics)]


def gradients_in_two(scene: Scene) -> Any:
    compute = af.value_and_grad(scene.loss)
    micro = list(scene.batch.micro_batches)[0]
    _, first = compute(scene.state, micro, sync=False)
    return gradients(scene, lambda state, _: compute(state, micro, into=first))


def mapped(scene: Scene) -> Any:
    _, grads = af.value_and_grad(scene.loss)(scene.state, scene.batch)
    return dict(grads.map(torch.clone).tensors)


def stepped(scene: Scene) -> Any:
    state, metrics = scene.step(scene.state, donate=False)
    return [fields(state), metrics, dict(metrics.sums)]


def applied(scene: Scene) -> Any:
    fork = scene.state.copy()
    metrics, grads = af.value_and_grad(scene.loss)(fork, scene.batch)
    held = dict(grads.tensors), dict(grads.buffers), metrics
    return [held, fields(af.apply_grads(fork, grads))]


def predicted(scene: Scene) -> Any:
    def fn(model: Any, batch: Any) -> Any:
        x = batch[0]
        rows = {"still": model.still.expand(len(x), -1), "norm": model.norm.weight}
        return {"x": x, "out": model(x), "still": rows["still"]}

    return list(af.predict(scene.state, scene.state.data, fn))


def collected(scene: Scene) -> Any:
    given, world = dict(scene.state.params), scene.world
    nothing: dict[str, Any] = {}
    return [
        af.reduce(given, world, "mean"),
        af.reduce(given, world, "max", weight=None),
        af.reduce(given, world, "mean", weight=2),
        af.gather(given, world),
        af.gather_ragged({"w": given["inner.weight"]}, world),
        af.broadcast(given, world),
        af.pad_across({"w": given["inner.weight"]}, world, dim=1),
        af.start_reduce(given, world).wait(),
        af.gather_objects({n: p.clone() for n, p in given.items()}, world),
        af.all_to_all([given] * world.size, world),
        *(call(nothing, world) for call in (af.gather_ragged, af.pad_across)),
    ]


TAKEN: dict[str, Callable[[Scene], Any]] = {
    "a copy": lambda s: fields(s.state.copy()),
    "a deep copy": lambda s: fields(copy.deepcopy(s.state)),
    "with_params": lambda s: dict(s.state.with_params(s.state.params).params),
    "frozen, to evaluate": lambda s: module_of(af.frozen(s.state)),
    "frozen, as trained": lambda s: module_of(af.frozen(s.state, at="train")),
    "full_params, to evaluate": lambda s: af.full_params(s.state),
    "full_params, as trained": lambda s: af.full_params(s.state, at="train"),
    "with_world": lambda s: fields(af.with_world(s.state, s.world)),
    "load": loaded,
    "load_part": loaded_in_part,
    "import_model": imported,
    "a step that leaves the state": stepped,
    "value_and_grad": gradients,
    "value_and_grad, into": gradients_in_two,
    "grads.map": mapped,
    "apply_grads, of a copy": applied,
    "predict": predicted,
    "evaluate": lambda s: af.evaluate(s.state, s.state.data, s.loss),
    "collectives": collected,
    "batches": lambda s: list(s.batch.micro_batches),
}
"""What is the taker's own: nothing of the state, nor of what another call gives, changes by it."""


@pytest.mark.parametrize("what", TAKEN)
@given(size=SIZES, setup=NAMED, seed=SEEDS, updates=UPDATES)
def test_what_is_taken_is_apart(
    what: str, size: int, setup: str, seed: int, updates: int
) -> None:
    """L22: it lies elsewhere, stays when the state trains on, and may be overwritten."""

    def rank(world: af.World) -> None:
        scene, twin = (
            Scene.of(world, setup, seed=seed, updates=updates) for _ in range(2)
        )
        held, again = TAKEN[what](scene), TAKEN[what](scene)
        assert in_common(held, fields(scene.state)) == 0
        assert in_common(held, again) == 0
        before = bits(held)
        ruin(again)
        assert before == bits(held)
        expected = values(twin.trained(2))
        assert expected == values(scene.trained(2))
        assert before == bits(held)

    simulate(size, rank)


def bound(scene: Scene) -> Any:
    with af.bind(scene.state, at="train") as module:
        return {n: p.detach() for n, p in module.named_parameters()}


LENT: dict[str, Callable[[Scene], Any]] = {
    "the state's own": lambda s: fields(s.state),
    "with_setup": lambda s: fields(s.state.with_setup(s.state.setup)),
    "with_trainable": lambda s: fields(
        s.state.with_trainable(lambda name, _: name != "scale")
    ),
    "with_slot": lambda s: fields(s.state.with_slot("more", 1)),
    "build": lambda s: fields(af.build(s.state)),
    "bind": lambda s: {**fields(s.state), "params": bound(s)},
    "a step": lambda s: fields(s.step(s.state)[0]),
}


@pytest.mark.parametrize("what", LENT)
@given(size=SIZES, setup=NAMED, seed=SEEDS)
def test_what_is_lent_is_not_copied(
    what: str, size: int, setup: str, seed: int
) -> None:
    """L22: parameters, buffers and what the optimizer keeps are the same memory as before."""

    def rank(world: af.World) -> None:
        scene = Scene.of(world, setup, seed=seed, updates=1)
        before = fields(scene.state)
        places = {name: set(spans(before[name])) for name in before}
        after = LENT[what](scene)
        for name in ("params", "buffers", "opt_state"):
            assert places[name] == set(spans(after[name]))
        assert "mine" in after["slots"]
        assert in_common(after["slots"]["mine"], before["slots"]["mine"]) == 1

    simulate(size, rank)


# What calls are given, and the caller may write to again

TABLE = torch.linspace(-1, 1, 12).reshape(4, 3)
STILL = torch.ones(2)


class Vectors(nn.Module):
    """Around what was there before: a table that is trained, and a constant that is written."""

    def __init__(self, table: torch.Tensor, still: torch.Tensor) -> None:
        super().__init__()
        self.table = nn.Embedding.from_pretrained(table, freeze=False)
        self.both = nn.Linear(1, 1)
        self.both.weight = self.both.bias = nn.Parameter(table[0, :1].view(1, 1))
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
def test_memory_that_others_hold_is_copied(
    instance: bool, shared: set[str], seed: int, updates: int
) -> None:
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


def test_what_nobody_else_holds_is_not_copied() -> None:
    """L22: a model that is given away keeps its memory."""
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    places = set(spans(module_of(model)))
    state = af.TrainState.create(
        model=model, optimizer=partial(torch.optim.SGD, lr=0.5)
    )
    assert places == set(spans([dict(state.params), dict(state.buffers)]))


@given(
    setup=NAMED,
    seed=SEEDS,
    how=st.sampled_from(["step", "gradients", "evaluate"]),
    updates=st.integers(1, 3),
)
def test_metrics_stay_what_they_were(
    setup: str, seed: int, how: str, updates: int
) -> None:
    """L34: those that are kept change with no parameter, buffer or counter, nor with who reads."""
    scene = Scene.of(af.World.single(device="cpu"), setup, seed=seed, updates=0)
    kept: list[tuple[Any, Any]] = []
    state, step = scene.state, af.make_step(scene.loss)
    for _ in range(updates):
        batch = next(iter(af.batches(state)))
        if how == "gradients":
            metrics, grads = af.value_and_grad(scene.loss)(state, batch)
            state = af.apply_grads(state, grads)
        else:
            state, metrics = step(state, batch)
        kept.append((metrics, {name: float(metrics[name]) for name in metrics}))
        for name in metrics:
            metrics[name].add_(1)
    for metrics, before in kept:
        assert before == {name: float(metrics[name]) for name in metrics}
    total = sum(metrics for metrics, _ in kept)
    if not any(each != each for _, found in kept for each in found.values()):  # noqa: PLR0124
        scales = [before["scale"] for _, before in kept]
        assert float(total["scale"]) == pytest.approx(sum(scales) / len(scales))


@given(seed=SEEDS, batch_size=st.integers(1, 6))
def test_a_measure_may_count_in_place(seed: int, batch_size: int) -> None:
    """L34: what evaluation adds up are the values that its function had at the time."""
    scene = Scene.of(af.World.single(device="cpu"), "none", seed=seed, updates=0)
    rows = [torch.ones(12, 3), torch.ones(12, 2)]
    data = af.Data(tuple(rows), batch_size=batch_size)
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
    seed=SEEDS,
    which=st.sets(st.sampled_from(["inner.weight", "scale", "norm.bias"])),
    view=st.booleans(),
)
def test_gradients_that_are_the_same_are_given_away_together(
    setup: str, seed: int, which: set[str], view: bool
) -> None:
    """L22: `map` gives copies apart, and together what lies in the memory of the given ones."""
    scene = Scene.of(af.World.single(device="cpu"), setup, seed=seed, updates=0)
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
        with pytest.raises(af.GradsError, match="given to apply_grads"):
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
    return [batch.indices.tolist() for batch in af.batches(state, epochs=2)]


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
        lambda given: af.plateau(min_lr=given), [0.5, 0.25]
    ),
    "budgets of a device map": lambda: record(
        lambda given: af.place(nn.Linear(2, 2), budgets=given), {"cpu": 1000}
    ),
    "transforms of a chain": lambda: record(
        lambda given: af.chain(*given), [af.ema(0.5), af.clip_grad_norm(0.5)]
    ),
    "parts of a schedule": of_join,
    "weights of samples": lambda: of_data(
        lambda given: af.Data(
            range(8), batch_size=3, order=af.orders.weighted(given.numpy())
        ),
        torch.arange(1.0, 9).double(),
    ),
    "lengths of samples": lambda: of_data(
        lambda given: af.Data(
            range(8),
            batch_size=2,
            order=af.orders.bucketed(given.numpy(), window=8),
        ),
        torch.arange(8),
    ),
    "costs of samples": lambda: of_data(
        lambda given: af.Data(
            range(8), batch_size=af.budget(given.numpy(), limit=4), shuffle=True
        ),
        torch.ones(8).long(),
    ),
    "a mix": lambda: of_data(
        lambda given: af.Data.mix(given[0], weights=given[1], batch_size=4),
        [[range(6), range(6)], [1, 2]],
    ),
    "groups of an optimizer": of_groups,
}
"""What records and definitions are made of: (what was given, what it made, a look at that)."""


@pytest.mark.parametrize("what", GIVEN)
def test_what_was_given_may_change(what: str) -> None:
    """L22: what a record was made of is checked once, and is its own from then on."""
    held, made, look = GIVEN[what]()
    before = look()
    ruin(held)
    assert before == look()
    assert made is not None


WRITTEN = "batch", "extras", "template", "saved behind its back", "sent"


@pytest.mark.parametrize("what", WRITTEN)
@given(size=SIZES, setup=NAMED, seed=SEEDS)
def test_what_a_call_was_given_is_the_callers_again(
    what: str, size: int, setup: str, seed: int
) -> None:
    """L22: when a call has returned, nothing of what it gave reads what it was given."""

    def rank(world: af.World) -> None:
        scene, twin = (Scene.of(world, setup, seed=seed, updates=1) for _ in range(2))
        expected = values(twin.trained(2))
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
            now = af.reduce(given, world, "mean")
            pending = af.start_reduce(given, world, "mean")
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
        state = store.latest(template)
    assert state is not None
    assert expected == values(attrs.evolve(scene, state=state).trained(2))


# Within a state


@given(
    setup=chains(reduced=True, max_size=4),
    size=SIZES,
    kind=st.sampled_from(["plain", "tied", "frozen"]),
    optimizer=st.sampled_from(["momentum", "adamw"]),
    updates=UPDATES,
)
def test_no_two_fields_of_a_state_share_memory(
    setup: Any, size: int, kind: str, optimizer: str, updates: int
) -> None:
    """L33: a slot begins, and goes on, in memory of its own, whatever transforms stand beside it."""
    run = Run(
        kind=kind,
        optimizer=optimizer,
        setup=af.chain(af.shard_data(), *(t for t in setup if t.name != "shard_data")),
        n=12,
        batch_size=12,
        loss="squared",
        dyadic=False,
    )

    def rank(world: af.World) -> None:
        state, _ = run.train(run.state(world), updates)
        found = {name: fields(state)[name] for name in ("params", "buffers")}
        found |= {f"opt_state {n}": each for n, each in state.opt_state.items()}
        found |= {f"slot {n}": each for n, each in state.slots.items()}
        names = sorted(found)
        assert [] == [
            (one, two)
            for i, one in enumerate(names)
            for two in names[i + 1 :]
            if in_common(found[one], found[two])
        ]
        held = [id(each) for each in containers_in(list(found.values()))]
        assert len(held) == len(set(held))

    simulate(size, rank)
