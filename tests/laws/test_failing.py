# SPDX-License-Identifier: Apache-2.0
"""A transform that raises, in any field at any call, costs the call and nothing more."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import attrs
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

import accelfn as af
from accelfn.testing import simulate
from tests.internals import FIELDS, Update, transform
from tests.laws.worlds import Found
from tests.strategies import OPTIMIZERS, differences, model, tensors

BEFORE = ("loss", "value_and_grad", "hyper", "grads", "after_skip", "module")
"""Fields whose failure leaves the state as it was; after_skip is after_update behind a skip."""
LATER = ("after_update", "finalize")
"""Fields whose state has been updated by then."""


@transform
class Fails:
    """Raise at some call of one field; else count calls of the others in a slot."""

    tells: ClassVar[Mapping[str, Any]] = {"sees_skips": True}

    field: str = ""
    at: int = 0
    calls: list[str] = attrs.field(factory=list, eq=False, repr=False)

    @property
    def without(self) -> tuple[str, ...]:
        always = {"init", "grads", "after_update"}
        return tuple(set(FIELDS) - always - {self.field})

    def _call(self, field: str, slot: Any = None) -> Any:
        if field == self.field:
            self.calls.append(field)
            if len(self.calls) == self.at + 1:
                raise KeyError(field)
        return {**(slot or {}), field: (slot or {}).get(field, 0) + 1}

    def init(self, state: af.TrainState) -> Any:
        return self._call("init")

    def loss(self, loss_fn: Any, slot: Any, update: Any) -> Any:
        def wrapped(*given: Any) -> Any:
            value = loss_fn(*given)
            self._call("loss")
            return value

        return wrapped, slot

    def value_and_grad(self, inner: Any, slot: Any, update: Any) -> Any:
        def wrapped(*given: Any, **named: Any) -> Any:
            found = inner(*given, **named)
            self._call("value_and_grad")
            return found

        return wrapped, slot

    def hyper(self, hyper: Mapping[Any, Any], slot: Any, update: Update) -> Any:
        self._call("hyper")
        return {"lr": 0.125}, slot

    def grads(self, grads: af.Grads, slot: Any, update: Update) -> Any:
        for grad in grads.tensors.values():
            grad.mul_(2.0)
        return grads, self._call("grads", slot)

    def after_update(self, state: af.TrainState, slot: Any, update: Update) -> Any:
        field = "after_skip" if update.skipped else "after_update"
        return state, self._call(field, slot)

    def finalize(self, state: af.TrainState, slot: Any, update: Update) -> Any:
        return state, self._call("finalize", slot)

    def eval_params(self, params: Any, slot: Any, update: Update) -> Any:
        self._call("eval_params")
        return params, slot

    def module(self, module: Any, state: af.TrainState) -> Any:
        self._call("module")
        return module


@attrs.frozen
class Play:
    """A run of four updates, in which the second is skipped."""

    field: str
    at: int
    first: bool
    optimizer: str
    parts: int
    scaled: bool

    def batches(self) -> list[Any]:
        generator = torch.Generator().manual_seed(3)
        draw = functools.partial(torch.randn, dtype=torch.float64, generator=generator)
        found = [(draw(4 * self.parts, 3), draw(4 * self.parts, 2)) for _ in range(4)]
        return [af.micro_batches(each, self.parts) for each in found]

    def state(self, world: af.World, *, fails: bool) -> af.TrainState:
        failing = Fails(self.field, at=self.at if fails else 10**6)
        others = [af.clip_grad_norm(0.5), af.skip_nonfinite(), af.ema(0.5)]
        setup = [failing, *others] if self.first else [*others, failing]
        return af.TrainState.create(
            model=model("norm"),
            optimizer=OPTIMIZERS[self.optimizer],
            setup=af.chain(
                af.accumulate(num_micro_batches=self.parts),
                af.wrap_ddp() if world.size > 1 else None,
                af.autocast("fp16", init_scale=8.0) if self.scaled else None,
                *setup,
            ),
            world=world,
        )


SIZES = st.sampled_from([1, 1, 1, 2])
plays = st.builds(
    Play,
    st.sampled_from(BEFORE),
    st.integers(0, 3),
    st.booleans(),
    st.sampled_from(["momentum", "adamw"]),
    st.integers(1, 2),
    st.booleans(),
)


def loss_of(play: Play) -> Callable[..., Any]:
    bad = play.batches()[1][0][0]

    def loss(net: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        value = (net(x) - y).square().mean()
        return value * math.nan if torch.equal(x, bad) else value

    return loss


@functools.cache
def expected_of(play: Play, size: int) -> list[list[Found]]:
    """Return the states of the run in which nothing fails, by rank."""

    def train(world: af.World) -> list[Found]:
        state, found = play.state(world, fails=False), []
        step = af.make_step(loss_of(play))
        for batch in play.batches():
            state, _ = step(state, batch)
            found.append(counted(state))
        return found

    return list(simulate(size, train))


def compare(play: Play, size: int, train: Callable[[af.World], list[Found]]) -> None:
    """Compare each rank's states with those of the run in which nothing fails."""
    expected = expected_of(attrs.evolve(play, at=0), size)
    for one, two in zip(expected, simulate(size, train), strict=True):
        for wanted, found in zip(one, two, strict=True):
            assert differences(wanted, found) == []


def counted(state: af.TrainState) -> Found:
    """Return all that is in a state, its counts too."""
    return tensors(state) | {"skipped": torch.tensor(state.num_skipped)}


@given(play=plays, size=SIZES)
def test_a_failed_call_costs_itself(play: Play, size: int) -> None:
    """The state is as it was, its counts and slots too; tried again, the run goes on bitwise."""

    def train(world: af.World) -> list[Found]:
        state, found = play.state(world, fails=True), []
        step = af.make_step(loss_of(play))
        for batch in play.batches():
            before = counted(state)
            try:
                state, _ = step(state, batch)
            except KeyError:
                assert differences(before, counted(state)) == []
                state, _ = step(state, batch)
            found.append(counted(state))
        return found

    compare(play, size, train)


@given(play=plays, size=SIZES)
@example(
    play=Play("grads", 2, first=False, optimizer="adamw", parts=1, scaled=True), size=1
)
def test_gradients_of_a_failed_update(play: Play, size: int) -> None:
    """Given again after an update that raised, they are refused, or give that very update."""

    def train(world: af.World) -> list[Found]:
        state, found = play.state(world, fails=True), []
        compute = af.value_and_grad(loss_of(play))

        def taken(batch: Any) -> af.Grads:
            try:
                return compute(state, batch)[1]
            except KeyError:
                return compute(state, batch)[1]

        for batch in play.batches():
            grads = taken(batch)
            try:
                state = af.apply_grads(state, grads)
            except KeyError:
                try:
                    state = af.apply_grads(state, grads)
                except af.errors.GradsError:
                    state = af.apply_grads(state, taken(batch))
            found.append(counted(state))
        return found

    compare(play, size, train)


@pytest.mark.parametrize("field", LATER)
@given(at=st.integers(0, 2), first=st.booleans(), size=SIZES)
def test_a_state_that_was_updated_says_so(field, at, first, size):
    """Where a transform fails behind the optimizer the state raises, and a copy goes on."""
    play = Play(field, at, first, "adamw", 1, scaled=False)

    def train(world: af.World) -> list[Found]:
        state, found = play.state(world, fails=True), []
        step = af.make_step(loss_of(play))
        for batch in play.batches():
            kept, tried = state.copy(), state.num_tried
            try:
                state, _ = step(state, batch)
            except KeyError:
                with pytest.raises(
                    af.errors.StateDonatedError, match=f"Update {tried} was inte"
                ):
                    step(state, batch)
                state, _ = step(kept, batch)
            found.append(counted(state))
            ended = state.copy()
            try:
                af.finalize(ended)
            except KeyError:
                with pytest.raises(af.errors.StateDonatedError, match="interrupted"):
                    ended.copy()
        return found

    compare(play, size, train)
