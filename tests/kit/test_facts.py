# SPDX-License-Identifier: Apache-2.0
"""What transforms tell of themselves, a user's own as accelfn's: read, refused, and held true."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import attrs
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import accelfn as af
from accelfn.errors import AccelfnWarning, ArgumentError, CompositionError, LawError
from accelfn.testing import Problem, check_transform
from tests.states import linear_state

ONE = (Problem(),)


@af.transform
class DrawsAllTheSame:
    """Says that it draws nothing, and adds noise."""

    tells: ClassVar[Mapping[str, Any]] = {"draws_nothing": True}

    def grads(self, grads: af.Grads, slot: None, update: af.Update) -> Any:
        return grads.map(lambda g: g + torch.randn_like(g)), slot


@af.transform
class NamesNoEntry:
    """Says that an entry differs by rank which its slot has not."""

    tells: ClassVar[Mapping[str, Any]] = {"by_rank": ("reminder",)}

    def init(self, state: af.TrainState) -> dict[str, int]:
        return {"remainder": 0}

    def after_update(self, state: af.TrainState, slot: Any, update: af.Update) -> Any:
        return state, {"remainder": slot["remainder"] + 1}


@af.transform
class RankInItsSlot:
    """Keeps what is this rank's own, and says so or does not; the rest may drift."""

    says: bool = True
    drifts: bool = False

    @property
    def tells(self) -> Mapping[str, Any]:
        return {"by_rank": ("mine",) if self.says else ()}

    def init(self, state: af.TrainState) -> dict[str, int]:
        return {"mine": 0, "all": 0}

    def after_update(self, state: af.TrainState, slot: Any, update: af.Update) -> Any:
        mine = slot["mine"] + 1 + update.world.rank
        count = update.world.rank if self.drifts else slot["all"] + 1
        return state, {"mine": mine, "all": count}

    def merge(self, slots: Sequence[Any], world: af.World) -> tuple[list[float], Any]:
        mine = max(each["mine"] for each in slots)
        return [1.0] * len(slots), {**slots[0], "mine": mine}


@af.transform
class JudgesNothing:
    """Says that it looks at gradients, and lets those pass that are not finite."""

    tells: ClassVar[Mapping[str, Any]] = {"judges_finite": True}

    def grads(self, grads: af.Grads, slot: None, update: af.Update) -> Any:
        return grads.map(lambda g: g / 2), slot


@af.transform
class RunsAgain:
    """Runs a module again in the backward pass, and says so or does not."""

    says: bool
    does: bool

    @property
    def tells(self) -> Mapping[str, Any]:
        return {"recomputes": self.says}

    def module(self, module: nn.Module, state: af.TrainState) -> nn.Module:
        for each in module.children() if self.does else ():
            each.forward = _checkpointed(each.forward)
        return module


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *given: checkpoint(forward, *given, use_reentrant=False)


@af.transform
class OtherParts:
    """Says that a batch is one part, and has two backward passes."""

    tells: ClassVar[Mapping[str, Any]] = {"micro_batches": lambda batch: [batch]}

    def value_and_grad(self, inner: Callable[..., Any], slot: Any, update: Any) -> Any:
        def twice(
            state: Any, batch: Any, /, *extras: Any, into: Any = None, sync: bool = True
        ) -> Any:
            _, into = inner(state, batch, *extras, into=into, sync=False)
            return inner(state, batch, *extras, into=into, sync=sync)

        return twice, slot


LIES = {
    "draws_nothing": (DrawsAllTheSame(), "not declare the fact draws_nothing"),
    "by_rank": (NamesNoEntry(), "names 'reminder', but its slot has no such entry"),
    "judges_finite": (JudgesNothing(), "an infinite loss made"),
    "recomputes": (RunsAgain(says=True, does=False), "no module ran again"),
    "recomputes, untold": (
        RunsAgain(says=False, does=True),
        "Declare the fact recomputes",
    ),
    "micro_batches": (OtherParts(), "returns 1 micro-batches, but a step called"),
}


@pytest.mark.parametrize("lie", LIES)
def test_what_is_told_must_be_so(lie):
    transform, said = LIES[lie]
    with pytest.raises(LawError, match=said):
        check_transform(transform, sizes=(2,), problems=ONE)


def test_what_differs_by_rank_is_told_by_entry():
    """An entry that is told may differ; its neighbours, or all without a word, have drifted."""
    check_transform(RankInItsSlot(), sizes=(2,), problems=ONE)
    with pytest.raises(LawError, match=r"(?s)replicas_agree.*by_rank"):
        check_transform(RankInItsSlot(says=False), sizes=(2,), problems=ONE)
    with pytest.raises(LawError, match=r"(?s)replicas_agree.*'all'"):
        check_transform(RankInItsSlot(drifts=True), sizes=(2,), problems=ONE)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"tell": {"apart": True}}, "did you mean 'tells'"),
        ({"refuse": {}}, "did you mean 'refuses'"),
        ({"tells": {"sees_skip": True}}, "did you mean 'sees_skips'"),
        ({"needs": {"bucket": "..."}}, "did you mean 'buckets'"),
        ({"refuses": {"eval_parms": "..."}}, "did you mean 'eval_params'"),
        (
            {"tells": property(lambda _: {"sees_skip": True})},
            "did you mean 'sees_skips'",
        ),
        ({"tels": {}, "__annotations__": {"tels": ClassVar}}, "did you mean 'tells'"),
        ({"without": ("after_updat",)}, r"without is \('after_updat',\)"),
        ({"without": "grads"}, "without is 'grads'"),
        ({"tells": {"by_rank": "rest"}}, "expected a tuple of strings"),
        ({"tells": ["recomputes"]}, r"Mine\(\).tells is \['recomputes'\]"),
        ({"refuses": {"grads": True}}, "expected a sentence"),
        (
            {"tells": {}, "__annotations__": {"tells": dict}},
            "so an option cannot have it",
        ),
        (
            {"module": "x", "__annotations__": {"module": str}},
            "so an option cannot have it",
        ),
    ],
)
def test_a_misspelt_fact_is_refused(body, said):
    """Where the class is made, or at the first chain, where properties are known."""
    with pytest.raises(ArgumentError, match=said):
        af.chain(af.transform(type("Mine", (), dict(body)))())


@pytest.mark.parametrize("name", ["seeds", "cells", "refused_once"])
def test_other_words_are_ones_own(name):
    """A constant that is no near miss stays a constant."""
    af.chain(af.transform(type("Mine", (), {name: 3}))())


@pytest.mark.parametrize("name", ["tells", "refuses", "needs", "without", "gives_up"])
def test_a_property_that_raises_is_not_taken_for_none(name):
    body = {name: property(lambda each: each.misspelt)}
    with pytest.raises(AttributeError, match="misspelt"):
        af.chain(af.transform(type("Mine", (), body))())


def test_gives_up_may_be_a_property():
    body = {"gives_up": property(lambda _: {"replicas_agree": "by an option"})}
    setup = af.chain(af.transform(type("Mine", (), body))())
    assert setup.gives_up() == {"replicas_agree": "by an option"}
    assert "apart" in setup.facts


def test_a_reduce_that_options_leave_out_lets_ranks_agree():
    body = {"reduce": None, "without": ("reduce",)}
    setup = af.chain(af.transform(type("Mine", (), body))(), af.check_replicas(every=1))
    assert "apart" not in setup.facts


def test_two_ways_to_compress_are_refused():
    body = {"tells": {"compression": lambda state: state}}
    mine = af.transform(type("Mine", (), body))()
    with pytest.raises(CompositionError, match="two ways to compress gradients"):
        af.chain(af.wrap_ddp(), mine, af.compress_grads("bf16"))


@pytest.mark.parametrize("needed", ["engine", "buckets"])
def test_what_is_needed_is_asked_for_where_a_state_is(needed):
    """A field or a fact: a part of a chain may lack it, and a state's setup may not."""
    body = {"needs": {needed: "needs another."}}
    part = af.chain(af.transform(type("Mine", (), body))())
    linear_state(setup=af.chain(af.wrap_ddp(), part))
    with pytest.raises(CompositionError, match=r"Mine\(\) needs another"):
        linear_state(setup=part)


def _state(setup: Any = None, **given: Any) -> af.TrainState:
    return af.TrainState.create(
        model=lambda: nn.Linear(1, 1, bias=False),
        optimizer=torch.optim.SGD,
        setup=setup,
        **given,
    )


def _total(model: nn.Module, rows: torch.Tensor) -> af.Loss:
    return af.Loss(model(rows).sum(), len(rows))


def test_gradients_after_an_update_say_what_they_are():
    """They are of the mean, with other transforms and without."""
    seen: list[float] = []

    @af.transform
    class Looks:
        def after_update(self, state: Any, slot: None, update: af.Update) -> Any:
            seen.append(float(update.grads.tensors["weight"]))
            return state, slot

    for setup in (Looks(), af.chain(af.clip_grad_norm(99.0), Looks())):
        af.make_step(_total)(_state(setup), torch.full((4, 1), 3.0))
    assert seen == [3.0] * 2


def test_a_scale_may_be_a_number():
    """What losses are multiplied by is divided out of gradients, tensor or not."""

    @af.transform
    class Scales:
        tells: ClassVar[Mapping[str, Any]] = {"loss_scale": lambda _: 128.0}

    rows = torch.full((4, 1), 3.0)
    plain, _ = af.make_step(_total)(_state(), rows)
    scaled, _ = af.make_step(_total)(_state(Scales()), rows)
    assert torch.equal(plain.params["weight"], scaled.params["weight"])


def test_looking_at_rates_says_nothing():
    """A schedule that is over is told of by steps alone."""
    begun = _state(schedule=lambda update: 1.0 if update < 1 else 0.0)
    state = attrs.evolve(begun, step=25)
    looks = state.definition.cache.looks_at
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert state.lrs == (0.0,)
    assert state.definition.cache.looks_at == looks
    with pytest.warns(AccelfnWarning, match="no longer changes"):
        af.make_step(_total)(state, torch.ones(1, 1))


def test_a_skip_changes_no_state():
    body = {
        "tells": {"sees_skips": True},
        "grads": lambda _, grads, slot, _update: (grads.with_skip(flag=True), slot),
        "after_update": lambda _, state, slot, _update: (
            state.with_params({n: p + 1 for n, p in state.params.items()}),
            slot,
        ),
    }
    state = _state(af.transform(type("Moves", (), body))())
    with pytest.raises(ArgumentError, match="a changed state after a skipped update"):
        af.make_step(_total)(state, torch.ones(1, 1))
    assert state.num_tried == 0
    assert set(state.params) == {"weight"}


def test_an_earlier_checkpoint_of_one_that_begins_late(tmp_path):
    """A slot that is made by the first update is none before it, nor when it is loaded."""

    @af.transform
    class Late:
        def grads(self, grads: af.Grads, slot: Any, update: af.Update) -> Any:
            return grads, (slot or 0) + 1

    state = _state(Late())
    af.save(state, tmp_path / "first")
    state, _ = af.make_step(_total)(state, torch.ones(1, 1))
    assert dict(af.load(state, tmp_path / "first").slots) == {}


def test_a_fact_of_ones_own_is_refused_by_another():
    """Users' transforms may have facts of their own, and refuse each other by them."""

    @af.transform
    class Quantizes:
        tells: ClassVar[Mapping[str, Any]] = {"rounds_weights": "to 4 bits"}

    @af.transform
    class Exact:
        refuses: ClassVar[Mapping[str, str]] = {
            "rounds_weights": "is exact, but {other!r} rounds {told}. Keep one."
        }

    told = r"Exact\(\) is exact, but Quantizes\(\) rounds to 4 bits. Keep one."
    for pair in ((Exact(), Quantizes()), (Quantizes(), Exact())):
        with pytest.raises(CompositionError, match=told):
            af.chain(*pair)


def test_an_init_that_gives_nothing_makes_no_slot():
    @af.transform
    class Looks:
        def init(self, state: af.TrainState) -> None:
            if not state.params:
                msg = "nothing to look at"
                raise ValueError(msg)

    state = linear_state(setup=Looks())
    assert dict(state.slots) == {}


@pytest.mark.parametrize("field", ["eval_params", "loss", "value_and_grad"])
def test_what_is_asked_often_keeps_no_slot(field):
    """A slot that such a method gives back would be lost, and is refused."""

    def counting(_self: Any, value: Any, slot: Any, _update: af.Update) -> Any:
        return value, {"asked": slot["asked"] + 1}

    body = {"init": lambda _self, _state: {"asked": 0}, field: counting}
    setup = af.transform(type("Counts", (), body))()
    state = linear_state(setup=setup)
    step = af.make_step(lambda model, x: model(x).mean())
    with pytest.raises(ArgumentError, match=f"{field} of the transform 'counts'"):
        af.eval_params(state) if field == "eval_params" else step(
            state, torch.ones(1, 1)
        )


def test_outside_of_a_step_there_are_no_gradients():
    seen: list[af.Update] = []

    @af.transform
    class Sees:
        def eval_params(self, params: Any, slot: None, update: af.Update) -> Any:
            seen.append(update)
            return params, slot

    state = linear_state(setup=Sees())
    af.eval_params(state)
    (update,) = seen
    assert update.state is state
    assert update.world is state.world
    assert (update.weight, update.num_tried, update.skipped) == (0, 0, False)
    assert not update.grads.tensors
