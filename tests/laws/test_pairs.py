# SPDX-License-Identifier: Apache-2.0
"""Several transforms with a say in one field: in which order, and each on its own slot.

The catalogue of public transforms has one of each kind; here are some for every field, whose
effects do not commute.
"""

import functools
import re
from collections.abc import Mapping
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import accelfn as af
from tests.internals import FIELDS, Update, explanation, transform
from tests.laws.worlds import single

FROM_THE_LEFT = (
    *("init", "data", "hyper", "grads", "after_update", "after_skip"),
    *("eval_params", "finalize", "module"),
)
"""Among them after_skip, which is after_update of who sees skips, behind one."""
FROM_THE_RIGHT = ("loss", "value_and_grad")
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

    def data(self, plan: af.typing.Plan) -> af.typing.Plan:
        self._note("data", None)
        return plan

    def loss(self, loss_fn: Any, slot: Any, update: Any) -> Any:
        self._note("loss", None)
        return functools.partial(loss_fn), slot

    def value_and_grad(self, inner: Any, slot: Any, update: Any) -> Any:
        self._note("value_and_grad", None)
        return functools.partial(inner), slot

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

    def finalize(self, state: af.TrainState, slot: Any, update: Update) -> Any:
        return state, self._note("finalize", slot)

    def module(self, module: nn.Module, state: af.TrainState) -> nn.Module:
        self._note("module", None)
        return module


def calls_of(slot: Any) -> tuple[str, ...]:
    return () if slot is None else slot["calls"]


@transform
class Skips:
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
    return af.TrainState.create(
        model=lambda: nn.ParameterList([torch.ones((), dtype=torch.float64)]),
        optimizer=options.pop("optimizer", functools.partial(torch.optim.SGD, lr=1.0)),
        data=af.Data(X, global_batch_size=8),
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
    af.eval_params(state)
    return af.finalize(state), list(LOG)


@given(
    setup=notes(),
    num_updates=st.integers(0, 3),
    at=st.sets(st.integers(0, 2)),
    place=st.integers(0, 3),
)
def test_each_field_has_its_order(setup, num_updates, at, place):
    """Values flow from the left, wrappers are made from the right, each once a call."""
    setup = [*setup[:place], Skips(tuple(sorted(at))), *setup[place:]]
    _, log = played(setup, num_updates)
    skipped = len(at & set(range(num_updates)))
    times = dict.fromkeys(FROM_THE_LEFT + FROM_THE_RIGHT, num_updates)
    times |= {"init": 1, "eval_params": 1, "finalize": 1}
    times |= {"module": min(num_updates, 1)}
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


SLOTTED = ("init", "grads", "after_update", "after_skip", "finalize")


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
def test_each_has_its_own_slot(setup, skips):
    """It gets what it gave last, None too; a skip leaves that of all who do not see it."""
    at = tuple(i for i, each in enumerate(skips) if each)
    state, _ = played([*setup, Skips(at)], len(skips))
    for each in setup:

        def told(slot, field, each=each):
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
        expected = told(expected, "finalize")
        assert expected == state.slots.get(each.name)
    # what is there is not begun again, None neither
    assert dict(state.with_setup(state.setup).slots) == dict(state.slots)


PRINTED = {
    field: rf"(\w+)\.{field}\b"
    for field in FROM_THE_LEFT + FROM_THE_RIGHT
    if field not in ("init", "eval_params", "finalize")
} | {"after_skip": r"# after a skipped update, only this runs: (\w+)"}


@given(setup=notes())
def test_explain_prints_what_is_called(setup):
    """What explain() prints of a field is what a step calls, innermost first."""
    text = explanation(af.chain(*setup))
    _, log = played([*setup, Skips((1,))], 2)
    for field, pattern in PRINTED.items():
        others = re.sub("# after a skipped update.*", "", text)
        printed = re.findall(pattern, text if field == "after_skip" else others)
        called = [name for name, each in dict.fromkeys(log) if each == field]
        order = 1 if field == "after_skip" else -1
        assert called == [n for n in printed[::order] if n != "skips"]
