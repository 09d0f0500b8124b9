# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C comes before an update or after it; and whoever has an old state finds the newest."""

import functools
import gc
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._C._dynamo.eval_frame import set_eval_frame
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
)

import accelfn as af
from tests.internals import step
from tests.strategies import differences, tensors

Moment = float | tuple[int, str]
"""A part of a step's operations; or an exchange of the handler, and a side of it."""


class Pressing(TorchDispatchMode):
    """Counts torch's operations, and sends Ctrl-C, once or more, just before one of them."""

    def __init__(self, at: int | None = None, times: int = 1) -> None:
        super().__init__()
        self.at, self.times, self.count = at, times, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        del types
        self.count += 1
        if self.count - 1 == self.at:
            for _ in range(self.times):
                signal.raise_signal(signal.SIGINT)
        return func(*args, **(kwargs or {}))


SEAMS = ("before", "after")


class AtASeam:
    """Sends Ctrl-C, once or more, just before or after accelfn exchanges the handler."""

    def __init__(self, exchange: int, seam: str, times: int = 1) -> None:
        self.exchange, self.seam, self.times = exchange, seam, times
        self.count = 0

    def __enter__(self) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(step, "_set", functools.partial(self.set, step._set))

    def __exit__(self, *_: object) -> None:
        self.patch.undo()

    def set(self, exchange: Any, number: int, handler: Any) -> None:
        self.press("before")
        exchange(number, handler)
        self.press("after")
        self.count += 1

    def press(self, seam: str) -> None:
        if (self.count, seam) == (self.exchange, self.seam):
            self.exchange = -1
            for _ in range(self.times):
                signal.raise_signal(signal.SIGINT)


moments = st.floats(0, 1, exclude_max=True) | st.tuples(
    st.integers(0, 1), st.sampled_from(SEAMS)
)


def pressing(at: Moment, count: int, times: int = 1) -> AtASeam | Pressing:
    """Return a block in which Ctrl-C comes at a moment of so many operations."""
    return (
        AtASeam(*at, times)
        if isinstance(at, tuple)
        else Pressing(int(at * count), times)
    )


@af.transform
class Skipping:
    """Wishes for the skip of every other update, and draws after each."""

    tells: ClassVar[Mapping[str, Any]] = {"sees_skips": True}

    def init(self, state):
        del state
        return torch.zeros(())

    def grads(self, grads, slot, update):
        return grads.with_skip(update.num_tried % 2, agreed=True), slot

    def after_update(self, state, slot, update):
        return state, slot + (torch.rand(()) if update.skipped else 1)


@af.transform
class Ending:
    """Owes something at the end."""

    def finalize(self, state, slot, update):
        for param in state.params.values():
            param.mul_(2)
        return state, slot


SETUPS = {
    "plain": af.chain(Ending()),
    "averaged": af.chain(af.clip_grad_norm(1.0), af.ema(0.5), Ending()),
    "skipped": af.chain(Skipping(), Ending()),
    "in backward": af.chain(af.optimizer_in_backward(), Ending()),
    "in parts": af.chain(af.accumulate(num_micro_batches=2), Ending()),
}
X = torch.arange(24.0).reshape(8, 3) / 24


def created(setup: str) -> af.TrainState:
    return af.TrainState.create(
        model=lambda: torch.nn.Sequential(
            torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)
        ),
        optimizer=functools.partial(torch.optim.Adam, lr=0.1),
        data=af.Data(X, global_batch_size=4),
        setup=SETUPS[setup],
    )


def updating(setup: str, call: str) -> Callable[[af.TrainState], af.TrainState]:
    """Return what takes a state to the next: a step, its second half, or the end."""

    def loss_fn(net: Any, batch: torch.Tensor) -> torch.Tensor:
        return net(batch).square().mean()

    step, compute = af.make_step(loss_fn), af.value_and_grad(loss_fn)

    def update(state: af.TrainState) -> af.TrainState:
        if call == "finalize":
            return af.finalize(state)
        batch = next(iter(af.batches(state)))
        if call == "step" or setup == "in backward":
            state, _ = step(state, batch)
            return state
        _, grads = compute(state, batch)
        return af.apply_grads(state, grads)

    return update


@contextmanager
def no_mode_is_left() -> Iterator[None]:
    """Take out the modes of a block: Ctrl-C may come just as one ends, which then stays."""
    before = len(_get_current_dispatch_mode_stack())
    try:
        yield
    finally:
        while len(_get_current_dispatch_mode_stack()) > before:
            _pop_mode()


@contextmanager
def default_handler() -> Iterator[None]:
    """Let Ctrl-C do what it does in a script; the handler must be the same afterwards."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def all_come() -> None:
    """Let what was held back come; it must not take long."""
    end = time.monotonic() + 30
    while any(each.name == "accelfn Ctrl-C" for each in threading.enumerate()):
        assert time.monotonic() < end
        time.sleep(1e-4)


@given(
    setup=st.sampled_from(sorted(SETUPS)),
    call=st.sampled_from(["step", "apply_grads", "finalize"]),
    updates=st.integers(0, 2),
    at=moments,
)
def test_an_interrupt_comes_before_an_update_or_after_it(setup, call, updates, at):
    """B3: Ctrl-C comes once, and the caller has the state before or the one after, bitwise."""
    update, first = updating(setup, call), updating(setup, "step")
    state = created(setup)
    for _ in range(updates):
        state = first(state)
    before = tensors(state)
    update(state.copy())  # builds the engine
    copied = state.copy()
    with Pressing() as counted:
        after = update(copied)
    after = tensors(after)
    with default_handler(), no_mode_is_left():
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - it may come in any of them
            with pressing(at, counted.count):
                state = update(state)
            all_come()
        all_come()
    found = tensors(state)
    assert not differences(before, found) or not differences(after, found)
    assert af.salvage(state) is state


@contextmanager
def kept_from_leaving() -> Iterator[None]:
    """Let other threads run at the very end of what holds Ctrl-C, for as long as they like."""

    def leave(self: step.defer_sigint, *error: object) -> None:
        leaves(self, *error)
        time.sleep(2e-3)

    with pytest.MonkeyPatch.context() as patch:
        leaves = step.defer_sigint.__exit__
        patch.setattr(step.defer_sigint, "__exit__", leave)
        yield


@contextmanager
def frames_of_dynamo() -> Iterator[None]:
    """Let torch evaluate frames, and threads take turns as fast as they can.

    CPython then looks for signals behind the calls of Python's own functions too.
    """
    interval, before = sys.getswitchinterval(), set_eval_frame(False)
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)
        set_eval_frame(before)


@given(
    setup=st.sampled_from(sorted(SETUPS)),
    call=st.sampled_from(["step", "apply_grads", "finalize"]),
    held_up=st.sampled_from([kept_from_leaving, frames_of_dynamo]),
)
def test_an_interrupt_waits_until_the_caller_has_what_it_held_back(
    setup, call, held_up
):
    """B3: what is noted in an update comes when the state is its caller's, wherever that is."""
    update = updating(setup, call)
    state = created(setup)
    with default_handler():
        for _ in range(8):
            before = state
            with pytest.raises(KeyboardInterrupt), held_up():  # noqa: PT012
                with AtASeam(1, "before"):
                    state = update(state)
                all_come()
            assert state is not before
            assert state is af.salvage(before)


@given(at=moments, presses=st.integers(1, 3))
def test_the_handler_in_place_is_asked(at: Moment, presses: int) -> None:
    """B3: a handler of the caller's gets each Ctrl-C, held back or not, and none is made up.

    So it is while the handler is exchanged, whoever has it in that moment.
    """
    update, told = updating("plain", "step"), list[int]()
    with Pressing() as counted:
        expected = update(created("plain"))
    before = signal.signal(signal.SIGINT, lambda number, _: told.append(number))
    mine = signal.getsignal(signal.SIGINT)
    try:
        with pressing(at, counted.count, presses):
            state = update(created("plain"))
        all_come()
        assert signal.getsignal(signal.SIGINT) is mine
    finally:
        signal.signal(signal.SIGINT, before)
    assert told == [signal.SIGINT] * presses
    assert differences(tensors(expected), tensors(state)) == []


@given(
    setup=st.sampled_from(sorted(SETUPS)),
    held=st.sets(st.integers(0, 5), max_size=3),
    updates=st.integers(0, 5),
    ends=st.booleans(),
)
def test_an_old_state_knows_the_newest(setup, held, updates, ends):
    """B3: of all that came of a state, salvage finds the newest, and keeps nothing else alive."""
    update, end = updating(setup, "step"), updating(setup, "finalize")
    state = created(setup)
    seen, old = [weakref.ref(state)], [state][: 0 in held]
    for number in range(1, updates + 1):
        state = update(state)
        seen.append(weakref.ref(state))
        if number in held:
            old.append(state)
    if ends:
        state = end(state)
    assert all(af.salvage(each) is state for each in [*old, state])
    gc.disable()
    try:
        alive = {id(each()) for each in seen} - {id(None)}
        assert alive <= {id(each) for each in [*old, state]}
        last, state = weakref.ref(state), None
        assert (last() is not None) == bool(old)
        del old
        assert last() is None
    finally:
        gc.enable()


def test_what_stood_in_a_function_is_found():
    """B3: a loop in a function that raises has lost nothing to who called it."""
    update, state = updating("plain", "step"), created("plain")

    def train(state: af.TrainState, updates: int) -> None:
        for _ in range(updates):
            state = update(state)
        raise KeyboardInterrupt

    expected = state.copy()
    for _ in range(3):
        expected = update(expected)
    with pytest.raises(KeyboardInterrupt):
        train(state, 3)
    with pytest.raises(af.errors.StateDonatedError, match="salvage"):
        update(state)
    found = af.salvage(state)
    assert differences(tensors(expected), tensors(found)) == []
    other = found.copy()
    update(found)
    assert af.salvage(other) is other
    assert af.salvage(state).step == 4
