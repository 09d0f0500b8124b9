# SPDX-License-Identifier: Apache-2.0
"""Several transforms with a say in one field: in which order, and each on its own slot.

The catalogue of public transforms has one of each kind; here are some for every field, whose
effects do not commute.
"""

import functools
import math
import re
from collections.abc import Mapping
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import accelfn as af
from accelfn.definition.explanation import explanation
from accelfn.definition.fields import FIELDS
from accelfn.definition.transform import transform
from accelfn.engine.read_loss import Samples
from accelfn.engine.runner import Delegating
from accelfn.state.update import Update
from tests.laws.worlds import single

FROM_THE_LEFT = (
    *("init", "data", "hyper", "loss_scale", "grads", "after_update", "after_skip"),
    *("observe", "eval_params", "finalize", "module"),
)
"""Among them after_skip, which is after_update of who sees skips, behind one."""
FROM_THE_RIGHT = ("loss", "value_and_grad", "runner")
"""Wrappers: the leftmost is outermost, so it is made last."""
ALONE = ("reduce", "engine", "merge")

LOG: list[tuple[str, str]] = []


@transform
class Notes:
    """Note each call of some fields, in a log of all and in the slot; change nothing.

    At one of them it gives None for its slot.
    """

    fields: tuple[str, ...] = ()
    forgets: str | None = None

    @property
    def tells(self) -> Mapping[str, Any]:
        return {"sees_skips": "after_skip" in self.fields}

    @property
    def without(self) -> tuple[str, ...]:
        return tuple(set(FIELDS) - set(self.fields))

    def _note(self, field: str, slot: Any) -> Any:
        LOG.append((self.name, field))
        if self.forgets == field:
            return None
        return {"owner": self.name, "calls": (*calls_of(slot), field)}

    def init(self, state: af.TrainState) -> Any:
        return self._note("init", None)

    def data(self, plan: af.Plan) -> af.Plan:
        self._note("data", None)
        return plan

    def loss(self, loss_fn: Any) -> Any:
        self._note("loss", None)
        return functools.partial(loss_fn)

    def value_and_grad(self, inner: Any) -> Any:
        self._note("value_and_grad", None)
        return functools.partial(inner)

    def loss_scale(self, scale: Any, slot: Any, update: Update) -> Any:
        self._note("loss_scale", slot)
        return scale * 1.0, slot

    def hyper(self, hyper: Mapping[Any, Any], slot: Any, update: Update) -> Any:
        self._note("hyper", slot)
        return {}, slot

    def grads(self, grads: af.Grads, slot: Any, update: Update) -> Any:
        return grads, self._note("grads", slot)

    def after_update(self, state: af.TrainState, slot: Any, update: Update) -> Any:
        field = "after_skip" if update.skipped else "after_update"
        return state, self._note(field, slot)

    def eval_params(self, params: Any, slot: Any, update: Update) -> Any:
        self._note("eval_params", slot)
        return params, slot

    def observe(self, value: float, slot: Any, update: Update) -> Any:
        return value, self._note("observe", slot)

    def finalize(self, state: af.TrainState, slot: Any, update: Update) -> Any:
        return state, self._note("finalize", slot)

    def module(self, module: nn.Module, state: af.TrainState) -> nn.Module:
        self._note("module", None)
        return module

    def runner(self, make: Any, state: af.TrainState) -> Any:
        self._note("runner", None)
        return make


def calls_of(slot: Any) -> tuple[str, ...]:
    return () if slot is None else slot["calls"]


@transform
class Skips:
    """Skip some updates."""

    at: tuple[int, ...] = ()

    def grads(self, grads: af.Grads, slot: None, update: Update) -> Any:
        return grads.with_skip(update.num_tried in self.at, agreed=True), slot


def noting(fields: set[str]) -> tuple[str, ...]:
    """Return fields, without after_skip where there is no after_update to be called."""
    if "after_update" not in fields:
        fields = fields - {"after_skip"}
    return tuple(sorted(fields))


@st.composite
def notes(draw: st.DrawFn) -> list[Notes]:
    """Draw some of them, most with several fields in common."""
    fields = draw(st.sets(st.sampled_from(FROM_THE_LEFT + FROM_THE_RIGHT), min_size=1))
    found = []
    for i in range(draw(st.integers(2, 3))):
        own = noting(fields - draw(st.sets(st.sampled_from(sorted(fields)))))
        forgets = draw(st.sampled_from([None, *own]))
        found.append(Notes(own, forgets=forgets, name="abc"[i]))
    return found


X = torch.arange(8, dtype=torch.float64)


def create(*setup: object, **options: Any) -> af.TrainState:
    """Return the state of one number."""
    return af.TrainState.create(
        model=lambda: nn.ParameterList([torch.ones((), dtype=torch.float64)]),
        optimizer=options.pop("optimizer", functools.partial(torch.optim.SGD, lr=1.0)),
        data=af.Data(X, batch_size=8),
        setup=af.chain(*setup),
        world=single(),
        **options,
    )


def mean(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model[0] * x).mean()


def number(state: af.TrainState) -> float:
    return float(state.params["0"])


def played(setup: list[Any], num_updates: int) -> tuple[af.TrainState, list[Any]]:
    """Return the state after a whole run, and the calls by which it came."""
    LOG.clear()
    state, step = create(*setup), af.make_step(mean)
    for _ in range(num_updates):
        state, _ = step(state, next(iter(af.batches(state))))
    state = af.observe(state, 1.0) if state.setup.owners["observe"] else state
    af.eval_params(state)
    return af.finalize(state), list(LOG)


@given(
    setup=notes(),
    num_updates=st.integers(0, 3),
    at=st.sets(st.integers(0, 2)),
    place=st.integers(0, 3),
)
def test_each_field_has_its_order(
    setup: list[Notes], num_updates: int, at: set[int], place: int
) -> None:
    """Values flow from the left, wrappers are made from the right, each once a call."""
    setup = [*setup[:place], Skips(tuple(sorted(at))), *setup[place:]]
    _, log = played(setup, num_updates)
    skipped = len(at & set(range(num_updates)))
    times = dict.fromkeys(FROM_THE_LEFT + FROM_THE_RIGHT, num_updates)
    times |= {"init": 1, "observe": 1, "eval_params": 1, "finalize": 1}
    times |= {field: min(num_updates, 1) for field in (*FROM_THE_RIGHT, "module")}
    times |= {"after_skip": skipped, "after_update": num_updates - skipped}
    owning = dict(af.chain(*setup).owners)
    seeing = (each for each in owning["after_update"] if "after_skip" in each.fields)
    owning["after_skip"] = tuple(seeing)
    for field, count in times.items():
        owners = [each.name for each in owning[field]]
        owners = [name for name in owners if name != "skips"]
        owners = owners[::-1] if field in FROM_THE_RIGHT else owners
        found = [name for name, called in log if called == field]
        if field == "data":  # arithmetic, done wherever a plan is asked for
            assert owners * (len(found) // max(len(owners), 1)) == found
        else:
            assert owners * count == found


SLOTTED = ("init", "grads", "after_update", "after_skip", "observe", "finalize")


@st.composite
def keepers(draw: st.DrawFn) -> list[Notes]:
    """Draw some that have most of the fields that give a slot."""
    found = []
    for name in "ab":
        gone = draw(st.sets(st.sampled_from(SLOTTED), max_size=2))
        own = noting(set(SLOTTED) - gone)
        forgets = draw(st.none() | st.sampled_from(own))
        found.append(Notes(own, forgets=forgets, name=name))
    return found


@given(setup=keepers(), skips=st.lists(st.booleans(), min_size=1, max_size=4))
def test_each_has_its_own_slot(setup: list[Notes], skips: list[bool]) -> None:
    """It gets what it gave last, None too; a skip leaves that of all who do not see it."""
    at = tuple(i for i, each in enumerate(skips) if each)
    state, _ = played([*setup, Skips(at)], len(skips))
    for each in setup:

        def told(slot: Any, field: str, each: Notes = each) -> Any:
            if field not in each.fields:
                return slot
            if each.forgets == field:
                return None
            return {"owner": each.name, "calls": (*calls_of(slot), field)}

        expected = told(None, "init")
        for skip in skips:
            tried = told(expected, "grads")
            if not skip:
                expected = told(tried, "after_update")
            elif "after_skip" in each.fields:
                expected = told(tried, "after_skip")
        expected = told(told(expected, "observe"), "finalize")
        assert expected == state.slots.get(each.name)
    # what is there is not begun again, None neither
    assert dict(state.with_setup(state.setup).slots) == dict(state.slots)


PRINTED = {
    field: rf"(\w+)\.{field}\b"
    for field in FROM_THE_LEFT + FROM_THE_RIGHT
    if field not in ("init", "observe", "eval_params", "finalize")
} | {"after_skip": r"# if skipped, it goes on with after_update: (\w+)"}


@given(setup=notes())
def test_explain_prints_what_is_called(setup: list[Notes]) -> None:
    """What explain() prints of a field is what a step calls, innermost first."""
    text = explanation(af.chain(*setup).owners)
    _, log = played([*setup, Skips((1,))], 2)
    for field, pattern in PRINTED.items():
        printed = re.findall(pattern, text)
        called = [name for name, each in dict.fromkeys(log) if each == field]
        nested = field not in ("loss_scale", "after_skip")
        assert called == [n for n in printed[:: -1 if nested else 1] if n != "skips"]


Affine = tuple[float, float]
AFFINE = st.tuples(st.sampled_from([0.5, 2.0, -1.0]), st.sampled_from([0.0, 1.0, 3.0]))
SEVERAL = st.lists(AFFINE, min_size=2, max_size=3)


def through(maps: list[Affine], value: float) -> float:
    """Return what maps, one after the other, make of a value."""
    for by, plus in maps:
        value = by * value + plus
    return value


@transform
class Maps:
    """Map what flows through one field by a line; where two meet, their order shows."""

    field: str
    by: float = attrs.field(kw_only=True)
    plus: float = attrs.field(kw_only=True)

    @property
    def without(self) -> tuple[str, ...]:
        return tuple(set(FIELDS) - {self.field})

    def _of(self, value: Any) -> Any:
        return value * self.by + self.plus

    def _moved(self, params: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: self._of(param) for name, param in params.items()}

    def data(self, plan: af.Plan) -> af.Plan:
        return attrs.evolve(
            plan, num_micro_batches=int(self._of(plan.num_micro_batches))
        )

    def loss(self, loss_fn: Any) -> Any:
        return lambda *given: self._of(loss_fn(*given))

    def value_and_grad(self, inner: Any) -> Any:
        def wrapped(*given: Any, **named: Any) -> Any:
            metrics, grads = inner(*given, **named)
            return metrics, grads.map(self._of)

        return wrapped

    def grads(self, grads: af.Grads, slot: None, update: Update) -> Any:
        return grads.map(self._of), slot

    def after_update(self, state: af.TrainState, slot: None, update: Update) -> Any:
        return state.with_params(self._moved(state.params)), slot

    def eval_params(self, params: Any, slot: None, update: Update) -> Any:
        return self._moved(params), slot

    def finalize(self, state: af.TrainState, slot: None, update: Update) -> Any:
        return state.with_params(self._moved(state.params)), slot

    def runner(self, make: Any, state: af.TrainState) -> Any:
        return lambda module: MapsLoss(make(module), self._of)


class MapsLoss(Delegating):
    """Gives the runner inside a loss that is mapped."""

    def __init__(self, inner: Any, of: Any) -> None:
        super().__init__(inner)
        self._of = of

    def before(self, loss_fn: Any, samples: Samples) -> Any:
        del samples
        return lambda *given: self._of(loss_fn(*given))


def mapping(field: str, maps: list[Affine]) -> af.chain:
    return af.chain(
        *(
            Maps(field, by=by, plus=plus, name=f"m{i}")
            for i, (by, plus) in enumerate(maps)
        )
    )


@pytest.mark.parametrize("field", ["loss", "value_and_grad", "runner"])
@given(maps=SEVERAL)
def test_wrappers_nest(field: str, maps: list[Affine]) -> None:
    """The leftmost wraps all others: it sees what they return, and its loss is theirs."""
    state = create(mapping(field, maps))
    after, metrics = af.make_step(mean)(state, X)
    slope, value = float(X.mean()), float(X.mean())
    if field == "value_and_grad":
        assert number(after) == 1.0 - through(maps[::-1], slope)
        assert float(metrics["loss"]) == value
        return
    # a runner hands its loss on to the one inside
    inner_first = maps[::-1] if field == "loss" else maps
    assert float(metrics["loss"]) == through(inner_first, value)
    assert number(after) == 1.0 - slope * math.prod(by for by, _ in maps)
    if field == "loss":
        found = af.evaluate(after, af.Data(X, batch_size=8), lambda *_: 5.0)
        assert [*found.values()] == [through(inner_first, 5.0)]


@pytest.mark.parametrize(
    "field", ["data", "grads", "after_update", "eval_params", "finalize"]
)
@given(maps=SEVERAL)
def test_values_flow_from_the_left(field: str, maps: list[Affine]) -> None:
    """Each gets what the one to its left has made, and the last one's is what counts."""
    if field == "data":  # counts
        maps = [(2 * abs(by), plus) for by, plus in maps]
        plan = af.batches(create(mapping(field, maps))).reading.plan
        assert plan.num_micro_batches == through(maps, 1)
        return
    setup = mapping(field, maps)
    state, _ = af.make_step(mean)(create(*setup), X)
    slope = float(X.mean())
    moved = 1.0 - (through(maps, slope) if field == "grads" else slope)
    assert number(state) == (through(maps, moved) if field == "after_update" else moved)
    seen = float(af.eval_params(state)["0"])
    assert seen == (through(maps, moved) if field == "eval_params" else number(state))
    before = number(state)
    ended = number(af.finalize(state))
    assert ended == (through(maps, before) if field == "finalize" else before)


@given(
    scales=st.lists(st.sampled_from([0.25, 2.0, 16.0]), max_size=3),
    parts=st.integers(1, 2),
)
def test_loss_scales_are_multiplied(scales: list[float], parts: int) -> None:
    """Losses are scaled by the product of all, which is divided out of gradients again."""
    setup = [Scales(scale, name=f"s{i}") for i, scale in enumerate(scales)]
    state = create(*setup)
    compute, grads = af.value_and_grad(mean), None
    for _ in range(parts):
        metrics, grads = compute(state, X, into=grads)
    assert float(metrics["loss"]) == float(X.mean())
    if scales:
        assert float(grads.taken.loss_scale) == math.prod(scales)
        expected = float(X.mean()) * math.prod(scales) * float(grads.weight)
        assert float(grads.tensors["0"]) == expected
    assert number(af.apply_grads(state, grads)) == 1.0 - float(X.mean())


@given(
    counts=st.lists(st.tuples(st.booleans(), st.integers(1, 4)), min_size=1, max_size=3)
)
def test_the_last_accumulation_cuts(counts: list[tuple[bool, int]]) -> None:
    """Of several, by number or by size, the last one cuts a share, and nothing is lost."""
    several = [
        af.accumulate(**{option: count}, name=f"a{i}")
        for i, (by_size, count) in enumerate(counts)
        for option in ["micro_batch_size" if by_size else "num_micro_batches"]
    ]
    state, last = create(*several), create(several[-1])
    batch, alone = (next(iter(af.batches(each))) for each in (state, last))
    assert batch.weights == alone.weights
    _, grads = af.value_and_grad(mean)(state, batch)
    assert grads.taken.num_micro_batches == len(alone.weights)
    assert math.isclose(number(af.apply_grads(state, grads)), 1.0 - float(X.mean()))


@transform
class Scales:
    """Multiply losses."""

    scale: float

    def loss_scale(self, scale: Any, slot: None, update: Update) -> Any:
        return scale * self.scale, slot


@transform
class Sets:
    """Set hyperparameters."""

    values: tuple[tuple[Any, float], ...] = ()

    def hyper(self, hyper: Mapping[Any, Any], slot: None, update: Update) -> Any:
        return dict(self.values), slot


PLACES = ["lr", "momentum", (0, "lr"), (1, "lr"), ("head", "lr"), (0, "momentum")]
SETTINGS = st.lists(
    st.tuples(st.sampled_from(PLACES), st.sampled_from([0.5, 1.0, 2.0, 4.0])),
    max_size=3,
).map(tuple)


@given(
    settings=st.lists(SETTINGS, max_size=3),
    scheduled=st.booleans(),
    names=st.sampled_from([(None, "head"), ("head", "head"), ("body", "head")]),
)
def test_the_last_one_that_sets_a_hyperparameter_wins(
    settings: list[tuple], scheduled: bool, names: tuple[str | None, str]
) -> None:
    """Whatever name it was set by: of all groups, of one by its index, or of all of a name."""

    def grouped(named: list) -> torch.optim.Optimizer:
        groups = [
            {"params": [named[0][1]], "lr": 0.125},
            {"params": [named[1][1]], "lr": 0.0625},
        ]
        for group, name in zip(groups, names, strict=True):
            group.update({"name": name} if name else {})
        return torch.optim.SGD(groups, momentum=0.25)

    rates = {0: 0.125, 1: 0.0625}
    rates = {i: rate * (8.0 if scheduled else 1.0) for i, rate in rates.items()}
    momenta = {0: 0.25, 1: 0.25}
    for each in settings:
        for where, value in dict(each).items():
            group, key = where if isinstance(where, tuple) else (None, where)
            into = rates if key == "lr" else momenta
            into |= {i: value for i in (0, 1) if group in (None, i, names[i])}
    state = af.TrainState.create(
        model=lambda: nn.ParameterList(torch.zeros(2).double().unbind()),
        optimizer=grouped,
        schedule=(lambda _: 8.0) if scheduled else None,
        setup=af.chain(*(Sets(s, name=f"s{i}") for i, s in enumerate(settings))),
        world=single(),
    )
    step = af.make_step(lambda model, _: (model[0] + model[1]).sum())
    for _ in range(2):
        state, _ = step(state, X)
    for i in (0, 1):  # gradients of 1: the second moves by 1 + momentum
        expected = -rates[i] * (2 + momenta[i])
        assert float(state.params[str(i)]) == expected
