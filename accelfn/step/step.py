# SPDX-License-Identifier: Apache-2.0
"""`make_step`, `apply_grads`, `finalize` and `sync_grads`: optimizer steps on a state.

`make_step(loss_fn)` calls `value_and_grad(loss_fn)` and then `apply_grads`, nothing else. With
these two functions you can write SAM, a GAN or distillation in a few lines.
"""

import _signal  # pyright: ignore[reportMissingImports]
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from types import FrameType, MappingProxyType
from typing import Any, Protocol
from weakref import ref

import attrs
import torch
from torch.autograd import profiler

from accelfn.base import system
from accelfn.base.arguments import advise, explain_call_errors, qualname
from accelfn.base.draws import NOTHING, own_modes, span
from accelfn.base.tree import cut_axes, local
from accelfn.collectives.packed import all_reduce_
from accelfn.collectives.replicas import check_sums
from accelfn.definition.transform import check_copied, facts_of
from accelfn.engine.doctor import compare_ranks
from accelfn.engine.engine import Engine, engine_of
from accelfn.engine.runner import LossFunction
from accelfn.errors import GradsError, StateDonatedError
from accelfn.model.optimizer import Assignments
from accelfn.state.results import Grads, Lease, Metrics, Number, Skip
from accelfn.state.state import (
    OptState,
    TrainState,
    apply_to_state,
    check_state,
    next_state,
    skip_update,
)
from accelfn.state.update import Update, apply_transforms, draws_for, plan_hyper
from accelfn.step.value_and_grad import Count, check_update, gradients_of
from accelfn.world import World

# pyright: reportPrivateUsage=false

# Deferred Ctrl-C: a KeyboardInterrupt is raised only before or after an update, and the new
# state is never lost.
#
# Python runs a signal handler between any two instructions of the main thread. If the handler
# raises during an update, some tensors are updated and others are not. If it raises after the
# step but before the caller's assignment, the only reference to the new state is lost. So
# SIGINT is recorded from the donation of a state until the step has returned, and sent again
# when the caller has the result.
#
# The handler is replaced only during an update, for milliseconds. The C functions of `_signal`
# take a tenth of the time of their Python wrappers. Other signals, and exceptions that
# debuggers and notebooks raise in a thread, are not deferred. After such an exception, use
# `af.salvage`.


_POLL, _LONGEST_POLL = 1e-4, 0.05
"""First and longest pause between two tries to send SIGINT, in seconds."""

_set: Any = _signal.signal
_get: Any = _signal.getsignal
_this_thread = threading.get_ident
_main_thread = threading.main_thread


class defer_sigint(AbstractContextManager["defer_sigint"]):
    """Defer Ctrl-C from `begin()` to the end of a `with` block, in the main thread.

    A second Ctrl-C calls the handler at once, because an update may hang. Return from the block
    directly, without further work. CPython checks for signals at function entry, at loop back
    edges and after calls. While a tool such as `torch.compile` evaluates frames, CPython also
    checks after calls of Python functions. So a signal may arrive between a `return` and the
    assignment of the returned value.
    """

    _previous: Any = None
    _noted = _is_over = _is_asked = _is_sent = False
    _on_the_way: Mapping[FrameType, int | None] = MappingProxyType({})

    def begin(self) -> None:
        """Defer SIGINT from now on, if its handler is a Python function."""
        if self._previous is None and _this_thread() == _main_thread().ident:
            handler = _get(signal.SIGINT)
            if callable(handler):  # otherwise SIGINT is ignored, or ends the process
                self._previous = handler
                _set(signal.SIGINT, self._note)

    def __exit__(self, *error: object) -> None:
        """Restore the handler, and send a deferred signal when the caller has the result."""
        if self._previous is None:
            return
        try:
            # restore first: a signal that arrives after the check would be lost
            _set(signal.SIGINT, self._previous)
            if self._noted:
                self._send_later()
        except KeyboardInterrupt:  # a signal arrived after the handler was restored
            if self._noted:
                raise
            self._send_later()
        finally:
            self._is_over = True

    def _note(self, number: int, frame: FrameType | None) -> None:
        lines = self._way_out(frame)
        if self._noted or not lines:
            self._previous(number, frame)
        self._noted, self._on_the_way = True, lines

    def _way_out(self, frame: FrameType | None) -> dict[FrameType, int | None]:
        """Return the frames of the block and of its callers, each with its current instruction.

        The result is empty if the block is not running, because a debugger may have stopped it
        before its end.
        """
        lines: dict[FrameType, int | None] = {}
        while frame is not None:
            if any(value is self for value in frame.f_locals.values()):
                lines = {frame: None}  # the block can end at several instructions
            elif lines:
                lines[frame] = frame.f_lasti
            frame = frame.f_back
        return lines

    def _send_later(self) -> None:
        _set(signal.SIGINT, self._pass_on)
        threading.Thread(target=self._send, name="accelfn Ctrl-C", daemon=True).start()

    def _send(self) -> None:
        """Send SIGINT to the main thread until the caller has the result.

        The main thread checks its frames itself, in the signal handler. Another thread must not
        read them: CPython 3.11 clears a frame that is still listed as running, and reading such
        a frame reads freed memory.
        """
        main = _main_thread().ident
        while main is not None and not self._is_sent:
            self._is_asked, pause = True, _POLL
            system.interrupt(main)
            while self._is_asked:  # takes long if the next update defers the signal
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_POLL)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        """Call the original handler if the caller has the result; otherwise do nothing yet."""
        if self._is_over and self._has_arrived(frame):
            self._on_the_way = {}  # frames refer to this block and to the caller's states
            if _get(signal.SIGINT) == self._pass_on:
                _set(signal.SIGINT, self._previous)
            self._is_sent, self._is_asked = True, False
            self._previous(number, frame)
        self._is_asked = False

    def _has_arrived(self, frame: FrameType | None) -> bool:
        """Return whether the main thread has left the call that contains the block."""
        inner = None
        while frame is not None and frame not in self._on_the_way:
            frame, inner = frame.f_back, frame
        if frame is None:
            return True
        at = self._on_the_way[frame]
        # at the same call, a new inner frame is the next update, so the caller has this result;
        # without an inner frame, the call may have returned, but its result is not assigned yet
        return at is not None and (at != frame.f_lasti or inner is not None)


# Skipped updates: all ranks make the same decision, on the host or on the device.


def resolve_skip(
    update: Update, wish: Skip, engine: Engine
) -> tuple[Update, torch.Tensor | None]:
    """Decide whether to skip an update, or return a flag with which the device decides.

    The flag is 1 if any rank wants to skip, else 0. If the function returns a flag, the host
    has not waited for the device.
    """
    grads = update.grads
    if not wish.agreed:
        all_reduce_([wish.flag], update.world, label="skip the update?")
    flag = (wish.flag != 0).to(torch.float32)
    if _device_can_skip(update, engine):
        return update.with_grads(grads.with_metrics(skipped=flag)), flag
    skip = bool(flag)
    update_with_flag = update.with_grads(grads.with_metrics(skipped=float(skip)))
    return attrs.evolve(update_with_flag, skipped=skip), None


def _reads_at_once(device: torch.device) -> bool:
    return device.type == "cpu"


def _device_can_skip(update: Update, engine: Engine) -> bool:
    """Return whether the device can skip the update, so that the host need not wait.

    The device can if an update changes only parameters, the optimizer's state and buffers.
    """
    if _reads_at_once(update.world.device) or not engine.can_skip(update.grads):
        return False
    if "offloads" in update.state.setup.facts:  # the optimizer runs on the host
        return False
    owners = update.state.setup.owners["after_update"]
    see_skips = {owner.name for owner in owners if "sees_skips" in facts_of(owner)}
    slots = update.state.slots.items()
    return all("skips_on_device" in facts_of(owner) for owner in owners) and all(
        update.slots[name] is slot for name, slot in slots if name not in see_skips
    )


# Stages of an update, from gradients to the next state. Each stage returns the next `Update`.
#
# The state is donated in these stages. An error before the optimizer step leaves the state
# unchanged. A later error ends the state's lease (a flag: the tensors may still be used), unless
# the engine knows that no tensor was changed.


_INTERRUPTED = (
    "Update {update} was interrupted before it was complete, so the tensors of this state may"
    " be partly updated. Load a checkpoint, or continue from a copy."
)
_BEFORE = (
    "In after_update, use the state that is the first argument. update.state is the state"
    " before the update, and the update has overwritten its tensors."
)
_UNFINISHED = (
    "These gradients are not reduced yet: DeepSpeed holds them on each rank. Compute the last"
    " micro-batch of the update with af.value_and_grad(loss_fn)(..., into=grads, sync=True)."
)
_DONATED = (
    "This state was passed to the step of update {update}, which updated its tensors in place."
    " Continue with the state that the step returned: state, metrics = step(state, batch). If it"
    " was lost, call af.salvage(state). To keep this state too, call state.copy() before, or"
    " step(state, batch, donate=False)."
)

_FINALIZED = (
    "af.finalize(state) updated the tensors of this state in place. Continue with the state that"
    " finalize returned: state = af.finalize(state)."
)


def take_update(
    state: TrainState, grads: Grads, hold: Callable[[], None]
) -> tuple[TrainState, Mapping[str, Number]]:
    """Apply gradients; return the next state and the metrics that transforms report.

    `hold` is called before the state is donated, because Ctrl-C would lose the state from then
    on.
    """
    is_profiling = profiler._is_profiler_enabled
    with span("accelfn apply_grads") if is_profiling else NOTHING:
        new_slots = grads.taken.slots
        slots = {**state._slots, **new_slots} if new_slots else state._slots
        assignments, update = plan_hyper(Update(state=state, slots=slots, grads=grads))
        if not grads.reduced:
            update = reduce_grads(update)
        reduced_grads, engine, flag = update.grads, engine_of(state), None
        try:
            update = transform_grads(update)
            if update.grads.taken.skip is not None:
                update, flag = resolve_skip(update, update.grads.taken.skip, engine)
            opt_state = None
            if not update.skipped:
                opt_state = _step_optimizer(update, assignments, engine, flag, hold)
                if update.grads.taken.owned_by_engine:  # DeepSpeed may skip
                    is_skipped = opt_state is None
                    reports = engine.binding.holder.reports()
                    reports["skipped"] = float(is_skipped)
                    new_grads = update.grads.with_metrics(**reports)
                    update = attrs.evolve(update, grads=new_grads, skipped=is_skipped)
            if opt_state is None:
                hold()
                engine.discard()
                after = skip_update(update, state)
            else:
                after = next_state(update, state, opt_state, flag, engine.params)
            after = _complete_update(update, after, reduced_grads, update.grads)
        finally:
            reduced_grads.give_away()
            if reduced_grads is not grads:
                grads.give_away()
        return after, update.grads.metrics


def take_in_backward(
    state: TrainState,
    compute: Callable[[], tuple[Metrics, Grads]],
    hold: Callable[[], None],
) -> tuple[TrainState, Metrics]:
    """Update a state during the backward pass that `compute` runs.

    Args:
        state: the state; it is donated as soon as the backward pass has computed a gradient.
        compute: runs forward and backward, and returns the metrics, and gradients without
        tensors.
        hold: called before the backward pass, because Ctrl-C would lose the state from then on.
    """
    with span("accelfn step in backward"):
        state.lease.check()
        world, setup = state.definition.world, state.definition.setup
        if world.loss.size > 1 and not setup.owners["engine"]:
            raise GradsError(_explain_unreduced(world.loss))
        engine = engine_of(state)
        assignments, update = plan_hyper(Update(state=state, slots=state._slots))
        number = state.num_tried
        engine.bind(state)
        live = engine.live_update
        assert live is not None  # noqa: S101 - the caller has checked this
        begin = partial(state.lease.end, StateDonatedError, _INTERRUPTED, update=number)
        live.plan(assignments, hold, begin)
        try:
            metrics, grads = compute()
        except BaseException:
            live.forget()  # the error may have come before the backward pass
            if state.lease.is_over:
                _undo(state, engine)
            raise
        grads.give_away()
        slots = {**update.slots, **grads.taken.slots}
        update = Update(state=state, slots=slots, grads=grads)
        after = next_state(update, state, engine.finish(grads, live.end()), None)
        return _complete_update(update, after), metrics


def reduce_grads(update: Update) -> Update:
    """Reduce the gradients over the ranks, as the setup defines.

    Raises:
        GradsError: the setup does not reduce, or `reduce` did not return sums over all ranks.
    """
    grads, definition = update.grads, update.state.definition
    if definition.copy.size == 1 and not definition.setup.reduces:
        return update
    owners = definition.setup.owners["reduce"]
    if not owners and grads.taken.owned_by_engine:
        raise GradsError(_UNFINISHED)
    if not owners or (owners[0].reduce is None and definition.trains_apart):
        raise GradsError(_explain_unreduced(definition.copy))
    owner = owners[0]
    if owner.reduce is None:
        return update
    with span("accelfn reduce"):
        grads.multiply_back()
        totals = _show_totals(grads, totals=True)
        sums, update = apply_transforms("reduce", totals, update, Grads)
        sums = _show_totals(sums, totals=False)
        if "apart" not in facts_of(owner):
            _check_sums(owner, sums, update)
    return update.with_grads(sums)


def transform_grads(update: Update) -> Update:
    """Divide gradients by their weight, and apply the `grads` methods of transforms."""
    grads = update.grads
    if grads.taken.owned_by_engine or not update.state.definition.setup.owners["grads"]:
        return update  # the engine's optimizer divides gradients, and may apply the transforms
    grads.divide(None)
    grads, update = apply_transforms("grads", grads, update, Grads)
    return update.with_grads(grads)


def end_donation(update: Update, after: TrainState, *grads: Grads) -> TrainState:
    """Move the tensors of a state to the next state, and return the next state.

    Raises:
        StateError: a transform's slot holds tensors of the state itself, or of gradients.
    """
    state = update.state
    if after._slots is not state._slots:
        _check_slots(state._slots, after, grads)
    activity = state.definition.world.connection.activity
    activity.is_between = True
    activity.num_updates += 1
    if state.definition.setup.owners["finalize"]:
        activity.on_close[state.name] = partial(_warn_of_owed, ref(after))
    number = state.num_tried
    state.lease.hand_over(after, StateDonatedError, _DONATED, update=number)
    return after


def _warn_of_owed(state_ref: "ref[TrainState]") -> None:
    """Warn if a world closes while its ranks still have different parameters."""
    state = state_ref()
    if state is None or state.definition.copies.size == 1:
        return
    for owner in state.definition.setup.owners["finalize"]:
        owes = facts_of(owner).get("owes")
        if owes and owes(state, state.slots[owner.name]) and state.world.is_main:
            advise(
                f"{owner!r}: the world was closed while the parameters of the state"
                f" {state.name!r} still differ between ranks, at update {state.step}. After the"
                " last step, before the world closes, call state = af.finalize(state)."
            )


def _check_slots(
    before: Mapping[str, Any], after: TrainState, grads: tuple[Grads, ...]
) -> None:
    """Check the slots that an update replaced, at their 1st, 2nd, 4th, 8th, ... change."""
    changes = after.definition.cache.slot_changes
    for owner in after.definition.setup:
        slot = after._slots.get(owner.name)
        if slot is None or slot is before.get(owner.name):
            continue
        count = changes[owner.name] = changes.get(owner.name, 0) + 1
        if count & (count - 1) == 0:
            # DeepSpeed does not show the gradients that it holds
            check_copied(owner, slot, after, *(g.tensors for g in grads if g.tensors))


def _step_optimizer(
    update: Update,
    assignments: Assignments,
    engine: Engine,
    flag: torch.Tensor | None,
    hold: Callable[[], None],
) -> OptState | None:
    """Step the optimizer and donate the state; return None if the optimizer changed nothing."""
    state, grads = update.state, update.grads
    engine.prepare(state, grads, assignments)
    hold()
    state.lease.end(StateDonatedError, _INTERRUPTED, update=state.num_tried)
    is_profiling = profiler._is_profiler_enabled
    try:
        # an optimizer that is not from torch may draw random numbers
        is_torchs = state.definition.has_torchs_optimizer
        with (
            span("accelfn optimizer") if is_profiling else NOTHING,
            NOTHING if is_torchs else draws_for(state, "optimizer"),
        ):
            opt_state = engine.update(grads, assignments, flag)
    except BaseException:
        _undo(state, engine)
        raise
    if opt_state is None:
        state.lease.restore()
    return opt_state


def _complete_update(update: Update, after: TrainState, *grads: Grads) -> TrainState:
    """Return the next state after the transforms' `after_update`, also after a skip."""
    if after.definition.setup.owners["after_update"]:
        try:
            after = apply_to_state("after_update", after, update)
        except StateDonatedError as error:
            error.add_note(_BEFORE)
            raise
    return end_donation(update, after, *grads)


def _undo(state: TrainState, engine: Engine) -> None:
    """Make a state usable again if an update raised before it changed any tensor."""
    if engine.is_undone():
        state.lease.restore()


def _show_totals(grads: Grads, *, totals: bool) -> Grads:
    """Return gradients whose `tensors` are those of totals, or of the mean if not `totals`."""
    return attrs.evolve(grads, taken=attrs.evolve(grads.taken, shows_totals=totals))


def _check_sums(owner: Any, sums: Grads, update: Update) -> None:
    """Raise unless `reduce` returned equal sums on all ranks, as far as can be checked.

    The check is a collective in the first update and in checked worlds. Simulated ranks compare
    without a collective.
    """
    if not sums.reduced:
        msg = (
            f"{owner!r}.reduce returned gradients with the weight of this rank only, so ranks"
            " would divide by different weights. Sum grads.tensors and grads.weight with"
            " af.all_reduce, and return grads.with_sums(sums, weight). If ranks differ on"
            f' purpose, declare gives_up = {{"replicas_agree": "..."}}.'
        )
        raise GradsError(msg)
    cache = update.state.definition.cache
    check_sums(
        sums.as_taken,
        sums.taken.divisor,
        update.world,
        label=f"the gradients that {owner!r}.reduce returned in update {update.num_tried}",
        is_first=not cache.compared_sums,
    )
    cache.compared_sums = True


def _explain_unreduced(ranks: World) -> str:
    return (
        f"The gradients are not reduced over the {ranks.size} ranks. Add"
        " af.wrap_ddp(), af.wrap_fsdp() or af.local_sgd(sync_every=...) to the setup, or"
        " call af.sync_grads(state, grads) before apply_grads."
    )


class Step(Protocol):
    """The step function that `make_step` returns."""

    def __call__(
        self, state: TrainState, batch: Any, /, *extras: Any, donate: bool = True
    ) -> tuple[TrainState, Metrics]:
        """Make one update; the given state is donated unless `donate=False`."""
        ...


@explain_call_errors
def make_step(loss_fn: LossFunction, *, count: Count | None = None) -> Step:
    """Create a step function: `(state, batch) -> (state, metrics)`.

    `loss_fn(model, batch, *extras)` gets the plain module under every engine. It returns the
    mean over the batch's samples, or `af.Loss(total, weight)`. With `count=fn` it also gets the
    counts of `fn` over the whole update; see `value_and_grad`.

    Call the step with a state and a batch of `af.batches`. Any other value is allowed as a
    batch too (under `accumulate` a list of values). Further arguments are extras, which the
    loss gets after the batch. The step updates the state's tensors in place and returns them in
    a new state; after that, the old state raises `StateDonatedError`. With `donate=False` the
    step works on a copy. If a step raises an error before its update, the given state is
    unchanged, including its buffers. `no_grad`, `inference_mode` and `autocast` around a step
    have no effect on it.

    Law: the result depends only on (state, batch, extras).

    Cost: the same as a hand-written loop; see docs/benchmarks.md.

    Raises:
        LossError: the loss is not a scalar, or has no gradient.
        NonFiniteLossError: the loss is infinite or NaN (checked on the CPU).
        BatchError: the batch does not follow the state's cursor.
        StateDonatedError: the state was already passed to a step.
        GradsError: the world has several ranks, and no transform reduces gradients over them.
    """
    compute = gradients_of(loss_fn, count)

    def step(
        state: TrainState, batch: Any, /, *extras: Any, donate: bool = True
    ) -> tuple[TrainState, Metrics]:
        if not isinstance(state, TrainState):
            check_state("step(state, batch)", state)
        if not donate:
            state = state.copy()
        definition = state.definition
        with defer_sigint() as hold, own_modes(definition.world.device):
            if "steps_in_backward" in definition.setup.facts:
                run = partial(compute, state, batch, *extras)
                return take_in_backward(state, run, hold.begin)
            metrics, grads = compute(state, batch, *extras)
            if definition.setup.owners["value_and_grad"]:
                check_update(state, grads)  # a user's transform may return anything
            state, values = take_update(state, grads, hold.begin)
            return state, metrics.with_values(values) if values else metrics

    step.__qualname__ = f"step of {qualname(loss_fn)}"
    return step


def prepare_engine(state: TrainState) -> TrainState:
    """Build the engine of a state now, so that its errors are raised before the first step.

    Raises:
        ReplicaMismatchError: the ranks hold different models.
    """
    check_state("af.prepare_engine(state)", state)
    state.lease.check()
    with own_modes(state.definition.world.device):
        engine_of(state).bind(state)
    return state


def release_engine(state: TrainState) -> None:
    """Free the engine of a state and of the states that follow it.

    The next step builds another engine.
    """
    check_state("af.release_engine(state)", state)
    state.definition.cache.clear()


@explain_call_errors
def apply_grads(state: TrainState, grads: Grads) -> TrainState:
    """Apply gradients to a state, as one optimizer update: `(state, grads) -> state`.

    Gradients are divided by their weight, changed by the `grads` methods of the setup's
    transforms, and passed to the optimizer. Then the `after_update` methods run. The given
    state and gradients are donated.

    Raises:
        GradsError: the gradients are of another update, or are not reduced in a world of
        several ranks.
        StateDonatedError: the state was already passed to a step.
    """
    check_state("af.apply_grads(state, grads)", state)
    state.lease.check()
    check_update(state, grads)
    with defer_sigint() as hold, own_modes(state.definition.world.device):
        return take_update(state, grads, hold.begin)[0]


def finalize(state: TrainState) -> TrainState:
    """Complete the work of a state's transforms, such as a last average over the ranks.

    Call `finalize` after the last step. The given state is donated. If no transform has such
    work, the same state is returned.
    """
    check_state("af.finalize(state)", state)
    state.lease.check()
    if not state.definition.setup.owners["finalize"]:
        return state
    with defer_sigint() as hold, own_modes(state.definition.world.device):
        hold.begin()
        after = attrs.evolve(state, lease=Lease())
        update = Update(state=state, slots=after.slots)
        number = state.num_tried
        state.lease.end(StateDonatedError, _INTERRUPTED, update=number)
        after = end_donation(update, apply_to_state("finalize", after, update))
        state.lease.end(StateDonatedError, _FINALIZED, update=number)
        return after


def sync_grads(state: TrainState, grads: Grads) -> Grads:
    """Reduce gradients and their weight over the ranks of the state's world.

    If copies of the model over several ranks train independently, reduce over the ranks of this
    rank's copy.

    Use `sync_grads` in custom steps whose gradients were computed with `sync=False`, or without
    `wrap_ddp`.

    Cost: one all-reduce of all gradients, flattened, and one all-reduce of their weight. At the
    first call ranks also compare their setups, and at update 0 their parameters.

    Law: the result equals that of `wrap_ddp`.

    Raises:
        GradsError: the gradients are already reduced, are sparse, or belong to another state.
        ReplicaMismatchError: the ranks' setups, optimizers, schedules, seeds or data differ.
        PeerFailedError: another rank failed.
    """
    check_state("af.sync_grads(state, grads)", state)
    state.lease.check()
    check_update(state, grads)
    ranks = state.definition.copy
    if ranks.size == 1:
        return attrs.evolve(grads, reduced=True)
    if grads.taken.owned_by_engine:
        raise GradsError(_UNFINISHED)
    if grads.reduced:
        msg = "af.sync_grads: these gradients are already reduced over the ranks."
        raise GradsError(msg)
    names = state.definition.skeleton.trainable
    sparse = [name for name, grad in grads.as_taken.items() if grad.is_sparse]
    if sparse:
        msg = (
            f"af.sync_grads(state, grads): the gradients of {', '.join(sparse[:5])} are sparse."
            " Create those layers with sparse=False, or let af.wrap_ddp() reduce the gradients."
        )
        raise GradsError(msg)
    if any("dp_shard" in cut_axes(grad) for grad in grads.as_taken.values()):
        msg = (
            'af.sync_grads(state, grads): af.wrap_fsdp(keep_grads="sharded") has already summed'
            " these gradients over the ranks, but not their weight. Instead of calling sync_grads,"
            ' compute the last micro-batch with sync=True, or use keep_grads="whole".'
        )
        raise GradsError(msg)
    if grads.taken.trained is None:  # a user created `grads`
        grads.check_fit({name: state.params[name] for name in names})
    compare_ranks(state)
    info = grads.taken
    factor = info.scale if info.lease.is_mean else 1
    with own_modes(ranks.device):
        totals = {
            name: local(grads.as_taken[name]) * factor
            if name in grads.as_taken
            else _zeros(state, name)
            for name in names
        }
        flags = [float(name in grads.as_taken) for name in names]
        counts = torch.tensor([0.0, *flags], dtype=torch.float64, device=ranks.device)
        counts[0] = info.divisor
        with span("accelfn reduce"):
            all_reduce_([*totals.values(), counts], ranks, label="sync_grads")
        # a parameter that no rank used has no gradient
        if len(grads.as_taken) < len(names):
            took_part = zip(names, counts[1:].tolist(), strict=True)
            totals = {name: totals[name] for name, some in took_part if some}
        layout = state.definition.layout
        if layout is not None:
            totals = {name: layout.laid(name, total) for name, total in totals.items()}
    info = attrs.evolve(info, divisor=counts[0], lease=Lease())
    return attrs.evolve(grads, tensors=totals, taken=info, reduced=True)


def _zeros(state: TrainState, name: str) -> torch.Tensor:
    """Return a zero gradient, in the shape that this rank computes."""
    layout, param = state.definition.layout, state.params[name]
    shape = param.shape if layout is None else layout.computed(name)
    return torch.zeros(shape, dtype=param.dtype, device=state.world.device)
