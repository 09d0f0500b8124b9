# SPDX-License-Identifier: Apache-2.0
"""What two transforms do in one field meets as composition says: values flow.

Each transform here is an affine map, or a factor, so what a chain of them does is known by hand.
"""

import math
from collections.abc import Mapping
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import accelfn as af
from tests.internals import FIELDS, Update, transform
from tests.laws.test_pairs import X, create, mean, number
from tests.laws.worlds import single

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

    def data(self, plan: af.typing.Plan) -> af.typing.Plan:
        return attrs.evolve(
            plan, num_micro_batches=int(self._of(plan.num_micro_batches))
        )

    def grads(self, grads: af.Grads, slot: None, update: Update) -> Any:
        return grads.map(self._of), slot

    def after_update(self, state: af.TrainState, slot: None, update: Update) -> Any:
        return state.with_params(self._moved(state.params)), slot

    def eval_params(self, params: Any, slot: None, update: Update) -> Any:
        return self._moved(params), slot

    def finalize(self, state: af.TrainState, slot: None, update: Update) -> Any:
        return state.with_params(self._moved(state.params)), slot


def mapping(field: str, maps: list[Affine]) -> af.chain:
    return af.chain(
        *(
            Maps(field, by=by, plus=plus, name=f"m{i}")
            for i, (by, plus) in enumerate(maps)
        )
    )


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
        assert float(grads.as_taken["0"]) == expected
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

    @property
    def tells(self) -> Mapping[str, Any]:
        return {"loss_scale": lambda _: self.scale}


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
