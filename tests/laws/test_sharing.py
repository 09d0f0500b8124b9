# SPDX-License-Identifier: Apache-2.0
"""Who holds what: with whom the results of public calls share memory, and what calls are given.

Each row of a table is a call. What it gives is apart from the state, or lent: by where tensors
lie, and by consequence. Who has a result overwrites it, and the state trains on as its twin; the
state trains on, and the result stays.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import attrs
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import accelfn as af
from accelfn.testing import simulate
from accelfn.testing.strategies import chains
from tests.laws.sharing import (
    SETUPS,
    Net,
    Scene,
    containers_in,
    fields,
    in_common,
    module_of,
    ruin,
    same_containers,
    spans,
    stored,
    undisturbed,
)
from tests.states import bits, values
from tests.strategies import Run

SIZES = st.sampled_from([2, 1])
SEEDS = st.integers(0, 3)
UPDATES = st.integers(0, 2)
NAMED = st.sampled_from(sorted(SETUPS))


def on_two_ranks(**fixed: Any) -> Callable[[Any], Any]:
    """Try a law with each setup, before it is drawn."""

    def explicitly(law: Any) -> Any:
        for setup in SETUPS:
            law = example(size=2, setup=setup, **fixed)(law)
        return law

    return explicitly


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
    _, first = compute(scene.state, scene.batch, sync=False)
    return gradients(scene, lambda state, batch: compute(state, batch, into=first))


def mapped(scene: Scene) -> Any:
    _, grads = af.value_and_grad(scene.loss)(scene.state, scene.batch)
    return dict(grads.map(torch.clone).tensors)


def stepped(scene: Scene) -> Any:
    state, metrics = scene.step(scene.state, donate=False)
    return [fields(state), metrics, dict(metrics.sums)]


def applied(scene: Scene) -> Any:
    fork = scene.state.copy()
    metrics, grads = af.value_and_grad(scene.loss)(fork, scene.batch)
    return [metrics, fields(af.apply_grads(fork, grads))]  # and grads are given away


def predicted(scene: Scene) -> Any:
    def fn(model: Any, batch: Any) -> Any:
        x = batch[0]
        rows = {"still": model.still.expand(len(x), -1), "norm": model.norm.weight}
        return {"x": x, "out": model(x), "still": rows["still"]}

    return list(af.predict(scene.state, scene.state.data, fn))


NOTHING: dict[str, Any] = {}


def collected(scene: Scene) -> Any:
    given, world = dict(scene.state.params), scene.world
    one = {"w": given["inner.weight"]}
    return [
        *(call(one, world) for call in (af.all_reduce, af.all_gather, af.broadcast)),
        af.start_all_reduce(one, world, "min").wait(),
        af.all_reduce(given, world, "mean"),
        af.all_reduce(given, world, "max", weight=None),
        af.all_reduce(given, world, "mean", weight=2),
        af.all_gather(given, world),
        af.all_gather({"w": given["inner.weight"]}, world, ragged=True),
        af.broadcast(given, world),
        af.pad_across({"w": given["inner.weight"]}, world, dim=1),
        af.start_all_reduce(given, world).wait(),
        af.all_gather_objects({n: p.clone() for n, p in given.items()}, world),
        af.all_to_all([given] * world.size, world),
        *(
            call(NOTHING, world)
            for call in (partial(af.all_gather, ragged=True), af.pad_across)
        ),
    ]


TAKEN: dict[str, Callable[[Scene], Any]] = {
    "a copy": lambda s: fields(s.state.copy()),
    "a deep copy": lambda s: fields(copy.deepcopy(s.state)),
    "with_params": lambda s: dict(s.state.with_params(s.state.params).params),
    "frozen, to evaluate": lambda s: module_of(af.snapshot_model(s.state, at="eval")),
    "frozen, as trained": lambda s: module_of(af.snapshot_model(s.state, at="train")),
    "full_params, to evaluate": lambda s: af.full_params(s.state, at="eval"),
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


@pytest.mark.filterwarnings("ignore:af.load and")
@pytest.mark.parametrize("what", TAKEN)
@on_two_ranks(updates=1)
@given(size=SIZES, setup=NAMED, updates=UPDATES)
def test_what_is_taken_is_apart(what: str, size: int, setup: str, updates: int) -> None:
    """L22: it lies elsewhere, stays when the state trains on, and may be overwritten."""
    expected = undisturbed(size, setup, updates)

    def rank(world: af.World) -> None:
        scene = Scene.of(world, setup, updates=updates)
        held, again = TAKEN[what](scene), TAKEN[what](scene)
        assert in_common(held, fields(scene.state)) == 0
        assert in_common(held, again) == 0
        assert not same_containers(held, again)
        assert not same_containers(held, fields(scene.state))
        before = bits(held)
        ruin(again)
        assert before == bits(held)
        assert expected[world.rank] == values(scene.trained(2))
        assert before == bits(held)

    simulate(size, rank)


class Twice:
    """Takes gradients of two losses, and keeps the tensors of the first."""

    kept: list[Any] = attrs.field(factory=list, kw_only=True, eq=False)

    def value_and_grad(self, compute: Any, slot: Any, update: Any) -> Any:
        def both(state: Any, batch: Any, *extras: Any, **options: Any) -> Any:
            _, one = compute(state, batch, *extras, **options)
            held = [*one.tensors.values(), *one.buffers.values()]
            before = bits(held)
            found = compute(state, batch, *extras, "others", **options)
            self.kept.append(before == bits(held))
            return found

        return both, slot


@on_two_ranks(updates=1)
@given(size=SIZES, setup=NAMED, updates=st.integers(1, 3))
def test_a_wrapper_may_keep_what_it_took(size: int, setup: str, updates: int) -> None:
    """L22: gradients that a transform takes stay when it takes others, as SAM does."""
    twice = af.transform(Twice)

    def rank(world: af.World) -> None:
        scene = Scene.of(world, setup, updates=0)
        wrapper = twice()
        state = scene.state.with_setup(af.chain(wrapper, scene.state.setup))
        for _ in range(updates):
            state, _ = scene.step(state)
        assert [True] * updates == wrapper.kept

    simulate(size, rank)


def bound(scene: Scene) -> Any:
    with af.borrow_model(scene.state, at="train") as module:
        return {n: p.detach() for n, p in module.named_parameters()}


LENT: dict[str, Callable[[Scene], Any]] = {
    "the state's own": lambda s: fields(s.state),
    "with_setup": lambda s: fields(s.state.with_setup(s.state.setup)),
    "with_trainable": lambda s: fields(
        s.state.with_trainable(lambda name, _: name not in ("scale", "still"))
    ),
    "with_slot": lambda s: fields(s.state.with_slot("more", 1)),
    "build": lambda s: fields(af.prepare_engine(s.state)),
    "bind": lambda s: {**fields(s.state), "params": bound(s)},
    "a step": lambda s: fields(s.step(s.state)[0]),
}


@pytest.mark.parametrize("what", LENT)
@given(size=SIZES, setup=NAMED)
def test_what_is_lent_is_not_copied(what: str, size: int, setup: str) -> None:
    """L22: parameters, buffers and what the optimizer keeps are the same memory as before."""

    def rank(world: af.World) -> None:
        scene = Scene.of(world, setup, updates=1)
        # not what is shown of it, which is refused when it is over
        before = {name: dict(each) for name, each in fields(scene.state).items()}
        places = {name: set(spans(before[name])) for name in before}
        after = LENT[what](scene)
        for name in ("params", "buffers", "opt_state"):
            assert places[name] <= set(spans(after[name]))
        assert "mine" in after["slots"]
        assert in_common(after["slots"]["mine"], before["slots"]["mine"]) == 1

    simulate(size, rank)


# Within a state


@given(
    setup=chains(reduced=True, max_size=4),
    size=SIZES,
    kind=st.sampled_from(["plain", "tied", "frozen"]),
    optimizer=st.sampled_from(["momentum", "adamw"]),
    updates=UPDATES,
)
def test_no_two_fields_of_a_state_share_memory(setup, size, kind, optimizer, updates):
    """L33: a slot begins, and goes on, in memory of its own, whatever stands beside it."""
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
        assert [
            (one, two)
            for i, one in enumerate(names)
            for two in names[i + 1 :]
            if in_common(found[one], found[two])
        ] == []
        held = [id(each) for each in containers_in(list(found.values()))]
        assert len(held) == len(set(held))

    simulate(size, rank)
