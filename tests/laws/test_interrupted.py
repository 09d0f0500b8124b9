# SPDX-License-Identifier: Apache-2.0
"""A step that raises at any of its operations costs the state only if it had changed it."""

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import accelfn as af
from accelfn.testing.strategies import Program
from tests.strategies import LOSSES, OPTIMIZERS, Run, differences, runs, tensors


class Interrupted(TorchDispatchMode):
    """Counts torch's operations, and raises instead of one of them."""

    def __init__(self, at: int | None = None) -> None:
        super().__init__()
        self.at, self.count = at, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        del types
        self.count += 1
        if self.count - 1 == self.at:
            raise KeyboardInterrupt
        return func(*args, **(kwargs or {}))


class PastTheCount(torch.optim.SGD):
    """Writes so that torch does not count it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        del closure
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.data.sub_(group["lr"] * param.grad)


KNOWN = {
    **OPTIMIZERS,
    "past": functools.partial(PastTheCount, lr=0.5),
    "foreach": functools.partial(torch.optim.Adam, lr=0.05, foreach=True),
    "fused": functools.partial(torch.optim.Adam, lr=0.05, fused=True),
    "lr": lambda named: torch.optim.SGD(named, lr=torch.tensor(0.5), momentum=0.5),
    "parts": af.combine_optimizers(
        (lambda _, param: param.ndim == 1, OPTIMIZERS["momentum"]),
        (..., OPTIMIZERS["adamw"]),
    ),
}
NOT_HERE = ("Optimizer", "LBFGS", "SparseAdam", "Muon", "Adafactor")
TORCHS = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and name not in NOT_HERE
}
UNSURE = {
    "past": "nobody can tell",
    "foreach": "torch does not count what is done to lists",
    "fused": "torch does not count what is done to lists",
    "lr": "it may be set to what it was",
}
SETUPS = {
    "plain": af.chain(),
    "clipped": af.chain(af.clip_grad_norm(1.0), af.ema(0.5)),
    "in backward": af.chain(af.optimizer_in_backward()),
}


@attrs.frozen
class Other(Run):
    """A run with more kinds of optimizers."""

    def program(self) -> Program:
        made = {**KNOWN, **TORCHS}[self.optimizer]
        known = Run.program(attrs.evolve(self, optimizer="sgd"))
        return attrs.evolve(known, optimizer=made)


@attrs.frozen
class Case:
    """The step of an update that is interrupted, or its second half alone."""

    run: Run
    updates: int
    is_whole: bool

    def ready(self) -> tuple[af.TrainState, Callable[[], af.TrainState]]:
        """Return a state after some updates, and what takes its next."""
        state, _ = self.run.train(self.run.state(), self.updates)
        batch, loss_fn = next(iter(af.batches(state))), LOSSES[self.run.loss]
        if self.is_whole:
            step = af.make_step(loss_fn)
            return state, lambda: step(state, batch)[0]
        compute = af.value_and_grad(loss_fn)
        _, grads = compute(state, batch)
        left = iter([grads])
        return state, lambda: af.apply_grads(
            state, next(left, None) or compute(state, batch)[1]
        )

    def num_operations(self) -> int:
        """Return how many operations an uninterrupted one takes."""
        _, step = self.ready()
        with Interrupted() as counted:
            step()
        return counted.count


@st.composite
def cases(draw: st.DrawFn) -> Case:
    optimizers = [st.sampled_from(sorted(each)) for each in (KNOWN, TORCHS)]
    run = draw(runs(batch_size=4, n=8, dyadic=False, loss="squared"))
    run = attrs.evolve(run, optimizer=draw(st.one_of(optimizers)))
    setup = draw(st.sampled_from(sorted(SETUPS)))
    run = attrs.evolve(run, setup=SETUPS[setup])
    other = Other(**attrs.asdict(run, recurse=False))
    whole = st.just(value=True) if setup == "in backward" else st.booleans()
    return Case(other, draw(st.integers(0, 2)), draw(whole))


def half(optimizer: str, updates: int) -> Case:
    """Return an update of which gradients are known."""
    run = Other(batch_size=4, n=8, dyadic=False, loss="squared", optimizer=optimizer)
    return Case(run, updates, is_whole=False)


def in_backward(optimizer: str) -> Case:
    """Return a whole first step, which updates as gradients come."""
    run = attrs.evolve(half(optimizer, 0).run, setup=SETUPS["in backward"])
    return Case(run, 0, is_whole=True)


@given(case=cases(), part=st.floats(0, 1, exclude_max=True))
@example(in_backward("foreach"), 0.5)  # it has, by a kernel on a list
@example(half("past", 1), 0.5)  # it has written, and nobody counted
@example(half("decay", 2), 0.2)  # it has not, and an update before has
@example(half("adamw", 1), 0.03)  # it has, of what the update before has made
def test_a_step_that_raises_leaves_a_state_or_none(case: Case, part: float) -> None:
    """The state is as it was, bitwise, and goes on so; or it raises, and cannot be salvaged."""
    at = int(part * case.num_operations())
    state, step = case.ready()
    before, held = (
        tensors(state),
        SimpleNamespace(
            step=state.step, cursor=state.cursor, num_skipped=state.num_skipped
        ),
    )
    for field in ("params", "buffers", "opt_state", "slots"):
        setattr(held, field, dict(getattr(state, field)))
    with pytest.raises(KeyboardInterrupt), Interrupted(at):
        step()
    try:
        left = tensors(state)
    except af.errors.StateDonatedError:
        with pytest.raises(af.errors.StateDonatedError):
            af.salvage(state)
        assert case.run.optimizer in UNSURE or differences(before, tensors(held)) != []
        return
    assert differences(before, left) == []
    _, undisturbed = case.ready()
    assert differences(tensors(undisturbed()), tensors(step())) == []
