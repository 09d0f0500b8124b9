# SPDX-License-Identifier: Apache-2.0
"""A store, all its options and calls drawn together, beside a dict of what must be there."""

import math
from datetime import timedelta
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import accelfn as af
from accelfn.testing import simulate
from tests.internals import gather_text, read_manifests
from tests.laws.disks import lent
from tests.states import linear_state
from tests.strategies import Run, differences, tensors


@attrs.frozen
class Options:
    """How a store is made."""

    keep: int | None
    keep_best: str | None
    best_is: str
    every: int | None
    frozen: str
    async_: bool

    def open(self, root: Path) -> af.CheckpointStore:
        options = attrs.asdict(self)
        if self.keep_best is None:
            del options["best_is"]  # of no metric
        return af.CheckpointStore(root, **options)


@attrs.frozen
class Save:
    """A save of a step, with a loss or without metrics."""

    step: int
    loss: float | None


@attrs.frozen
class Again:
    """The store is closed, and another is made there."""

    options: Options


@attrs.frozen
class Restore:
    """A step's state is restored, or the newest."""

    step: int | None


@attrs.define
class Model:
    """What a store must have: by step, the number of the save, its loss, and `frozen`."""

    options: Options
    there: dict[int, tuple[int, float | None, str]] = attrs.field(factory=dict)
    is_new: bool = True

    def kept(self) -> set[int]:
        keep = len(self.there) if self.options.keep is None else self.options.keep
        return {*sorted(self.there)[max(0, len(self.there) - keep) :], *self.best()}

    def best(self) -> list[int]:
        """Return the best step; of equals, the earliest."""
        if self.options.keep_best is None:
            return []
        sign = 1 if self.options.best_is == "min" else -1
        found = [
            (sign * loss, step)
            for step, (_, loss, _) in self.there.items()
            if loss is not None and not math.isnan(loss)
        ]
        return [step for _, step in sorted(found)[:1]]

    def leave(self, kept: set[int]) -> None:
        if self.options.keep is not None:
            self.there = {step: self.there[step] for step in kept}

    def save(self, each: Save, number: int) -> bool:
        """Return whether it can be saved."""
        if self.is_new and self.there:  # what an earlier store left is put in order
            self.leave(self.kept())
        self.is_new = False
        if each.step in self.there:
            return False
        self.there[each.step] = number, each.loss, self.options.frozen
        self.leave({each.step, *self.kept()})
        return True


def state_of(number: int, step: int, world: af.World) -> af.TrainState:
    """Return the state of a save: what is trained says which, and what is frozen stays."""
    state = Run(n=4, batch_size=2, kind="frozen", seed=1).state(world)
    params = {
        name: torch.full_like(value, number + 1) if value.requires_grad else value
        for name, value in state.params.items()
    }
    return attrs.evolve(state, step=step, params=params)


def together(state: af.TrainState, *, joint: bool) -> Any:
    """Return a state, or two that are saved together."""
    if not joint:
        return state
    params = {n: p * 2 if p.requires_grad else p for n, p in state.params.items()}
    return {"one": state, "two": attrs.evolve(state, params=params)}


LOSSES = st.sampled_from([None, math.nan, -1.0, 1.0, 1.0, 2.0, math.inf])
OPTIONS = st.builds(
    Options,
    keep=st.sampled_from([None, 1, 1, 2, 3]),
    keep_best=st.sampled_from([None, "loss"]),
    best_is=st.sampled_from(["min", "max"]),
    every=st.sampled_from([None, 1, 2, 3]),
    frozen=st.sampled_from(["write", "hash"]),
    async_=st.booleans(),
)
STEPS = st.integers(0, 6)
CALLS = st.one_of(
    st.builds(Save, step=STEPS, loss=LOSSES),
    st.builds(Save, step=STEPS, loss=LOSSES),
    st.builds(Again, options=OPTIONS),
    st.builds(Restore, step=st.one_of(st.none(), STEPS)),
)


@given(
    options=OPTIONS,
    calls=st.lists(st.tuples(CALLS, st.booleans()), min_size=1, max_size=7),
    size=st.sampled_from([1, 1, 2, 3]),
    joint=st.booleans(),
)
@example(  # a step that is no truth
    options=Options(None, None, "min", None, "write", async_=False),
    calls=[(Save(0, None), True), (Save(1, None), True)],
    size=1,
    joint=False,
)
@example(  # two stay
    options=Options(2, None, "min", None, "write", async_=False),
    calls=[(Save(0, None), False), (Save(1, None), False)],
    size=1,
    joint=False,
)
@example(  # a run that went back
    options=Options(1, None, "min", None, "write", async_=False),
    calls=[(Save(3, None), True), (Save(1, None), True)],
    size=1,
    joint=False,
)
def test_a_store_is_what_was_saved_and_kept(options, calls, size, joint):
    """After any calls: its steps, the newest, the best, what each restores to, what is due."""

    def rank(world: af.World) -> None:
        store, model = options.open(root), Model(options)
        first = together(state_of(-1, 0, world), joint=joint)
        for number, (call, waits) in enumerate(calls):
            match call:
                case Save():
                    state = state_of(number, call.step, world)
                    given_ = together(state, joint=joint)
                    saved(store, model, call, number, given_)
                case Again():
                    store.close()
                    model.options, model.is_new = call.options, True
                    store = call.options.open(root)
                case Restore(step):
                    restored(store, model, first, step)
            if waits:
                store.wait()
                agrees(store, model)
            gather_text("", world, label="looked")  # before any goes on
        store.close()
        agrees(store, model)
        gather_text("", world, label="looked")
        for step in model.there:
            restored(store, model, first, step)

    with lent() as root:
        simulate(size, rank)
        assert all(path.name.startswith("step-") for path in root.iterdir())


def saved(store, model, call, number, state) -> None:
    """Save, where the step is not there yet; else all ranks are told."""
    due(store, model, state, call.step)
    metrics = None if call.loss is None else {"loss": call.loss, "other": 0.0}
    if model.save(call, number):
        assert store.save(state, metrics=metrics).name == f"step-{call.step:08d}"
        return
    with pytest.raises(af.errors.CheckpointWriteError, match="already exists"):
        store.save(state, metrics=metrics)


def due(store: af.CheckpointStore, model: Model, state: Any, step: int) -> None:
    every = model.options.every
    if every is None:
        with pytest.raises(af.errors.ArgumentError, match="every="):
            store.due(state)
    else:
        assert store.due(state) == (step > 0 and step % every == 0)


def restored(store, model, first, step) -> None:
    """Restore a step, or the newest, and compare it with what was saved."""
    if step is None and not model.there:
        assert store.restore(first) is first
        return
    if step is not None and step not in model.there:
        with pytest.raises(
            af.errors.CheckpointError, match=f"no checkpoint of step {step},"
        ):
            store.restore(first, step=step)
        return
    chosen = max(model.there) if step is None else step
    found, joint = store.restore(first, step=step), isinstance(first, dict)
    world = first["one"].world if joint else first.world
    state = state_of(model.there[chosen][0], chosen, world)
    expected = together(state, joint=joint)
    pairs = [(expected[n], found[n]) for n in first] if joint else [(expected, found)]
    for one, two in pairs:
        assert two.step == chosen
        assert differences(tensors(one), tensors(two)) == []


def agrees(store: af.CheckpointStore, model: Model) -> None:
    """Compare a directory with what must be there; what is kept by hash is not written."""
    steps = sorted(model.there)
    assert list(store.steps) == steps
    name = f"step-{steps[-1]:08d}" if steps else None
    assert (store.latest and store.latest.name) == name
    for step, (_, _, frozen) in model.there.items():
        manifests = read_manifests(store.directory / f"step-{step:08d}")
        for manifest in manifests.values():
            assert bool(manifest.kept) == (frozen == "hash")
    if model.options.keep_best is None:
        with pytest.raises(af.errors.ArgumentError, match="keep_best="):
            _ = store.best
        return
    best = [f"step-{step:08d}" for step in model.best()]
    assert ([store.best.name] if store.best else []) == best


FACTS = {
    "samples": st.sampled_from([4, 5]),
    "batch_size": st.sampled_from([1, 2]),
    "remainder": st.sampled_from(["short", "drop"]),
    "order": st.booleans(),
    "fingerprint": st.sampled_from(["a", "b"]),
}
"""By which a checkpoint knows data."""
SAMPLED = st.fixed_dictionaries(FACTS)
NAMES = st.sampled_from(sorted(FACTS))


def sampled(facts: dict[str, Any], world: af.World, value: float) -> af.TrainState:
    """Return a state of data with these facts, whose bias has a value."""
    data = af.Data(
        torch.zeros(facts["samples"], 2),
        global_batch_size=facts["batch_size"],
        remainder=facts["remainder"],
        shuffle=facts["order"],
        fingerprint=facts["fingerprint"],
    )
    state = linear_state(2, 1, data=data, world=world)
    bias = torch.full_like(state.params["bias"], value)
    return attrs.evolve(state, params={**state.params, "bias": bias}, step=1)


@given(
    first=SAMPLED,
    differing=st.sets(NAMES, max_size=2),
    allow=st.sets(NAMES, max_size=3),
    other=SAMPLED,
    size=st.sampled_from([1, 2]),
)
def test_data_may_differ_in_what_is_allowed(first, differing, allow, other, size):
    """In nothing else, whether `restore`, `load` or `load_part` was told what may."""
    now = {**first, **{name: other[name] for name in differing}}
    changed = {name for name in FACTS if now[name] != first[name]}

    def rank(world: af.World) -> None:
        with af.CheckpointStore(root, keep=None, async_=False) as store:
            saved = store.save(sampled(first, world, 7.0))
        state, words = sampled(now, world, 0.0), tuple(allow)
        calls: list[Any] = [
            lambda: store.restore(state, allow=words),
            lambda: store.restore(state, step=1, allow=words),
            lambda: af.load(state, saved, allow=words),
            lambda: af.load_part(state, saved, ["params", "cursor"], allow=words).state,
        ]
        for call in calls:
            if changed <= allow:
                assert call().params["bias"].item() == 7.0
            else:
                with pytest.raises(af.errors.CheckpointError, match="with other data"):
                    call()

    with lent() as root:
        simulate(size, rank)


REFUSED = {
    "a number as a metric": (
        {"keep_best": 3},
        r"keep_best=3\): expected the name of a",
    ),
    "a list of metrics": ({"keep_best": ["loss"]}, r"keep_best=\['loss'\]\): expected"),
    "another best": (
        {"keep_best": "loss", "best_is": "low"},
        r"best_is='low'.*\"min\" or \"max\"",
    ),
    "best of no metric": ({"best_is": "max"}, "no effect without keep_best="),
    "none kept": ({"keep": 0}, r"keep=0\): expected an integer of at least 1, or None"),
    "no time": ({"every": timedelta()}, r"every=.*\): expected a number of updates"),
    "time back": ({"every": timedelta(seconds=-1)}, r"every=.*\): expected a number"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_options_are_refused(tmp_path, name):
    """Before the directory is made, with the option and its value."""
    options, words = REFUSED[name]
    with pytest.raises(af.errors.ArgumentError, match=words):
        af.CheckpointStore(tmp_path / "runs", **options)
    assert not (tmp_path / "runs").exists()
