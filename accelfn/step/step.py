# SPDX-License-Identifier: Apache-2.0
"""The step: gradients of a loss, then an update; the product of two public functions.

`make_step(loss_fn)` is `value_and_grad(loss_fn)` followed by `apply_grads`, nothing else,
so SAM, a GAN or distillation are a few lines of a user's own code.
"""

import _signal  # pyright: ignore[reportMissingImports]
import functools
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from types import FrameType
from typing import Any, ParamSpec, Protocol, TypeVar
from weakref import ref

import attrs
import torch
from torch.autograd import profiler

from accelfn.base.arguments import advise, explain_call_errors
from accelfn.base.draws import NOTHING, own_modes, span
from accelfn.base.tree import cut_axes, local
from accelfn.collectives import all_reduce_, check_sums
from accelfn.definition.transform import check_copied, facts_of
from accelfn.engine.engine import Engine, compare, engine_of
from accelfn.engine.loss import LossFunction
from accelfn.errors import GradsError, StateDonatedError
from accelfn.model.optimizer import Assignments
from accelfn.state.grads import Grads, Lease, Skip
from accelfn.state.metrics import Metrics, Number
from accelfn.state.state import (
    OptState,
    TrainState,
    check_state,
    skipped,
    successor,
    through_state,
)
from accelfn.state.update import Update, draws_for, planned_for, through
from accelfn.step.value_and_grad import Count, check_update, gradients_of
from accelfn.world import World

# Ctrl-C comes before an update or after it, and never takes the state that it makes.
#
# Python runs a signal's handler between two instructions of the main thread, wherever that
# is. An exception from one in the midst of an update leaves tensors that nobody can tell;
# one that comes between a step's end and the caller's assignment takes the only record of
# the new state. So from the moment in which a state is given away until the step has
# returned, the signal is noted, and sent again when the caller has what the step returned.
#
# The handler is exchanged for those milliseconds alone, by the functions of `signal` in C,
# for what Python wraps around them takes ten times as long. Other signals, and exceptions
# that debuggers and notebooks raise in a thread by themselves, are not held: there is
# `af.salvage`.


P = ParamSpec("P")
R = TypeVar("R")
_POLL, _LONGEST_POLL = 1e-4, 0.05
"""Seconds; a step that holds a signal back is over in about as many as the first."""

_set: Any = _signal.signal
_get: Any = _signal.getsignal
_this_thread = threading.get_ident
_main_thread = threading.main_thread


class holding(AbstractContextManager["holding"]):
    """Hold Ctrl-C back from `begin()` to the end of a `with` block, in the main thread.

    A second one goes to its handler at once, for an update may hang. Whoever returns from the
    block must do nothing more: CPython looks for signals where functions begin, where loops
    turn round, and behind calls. Behind calls of Python's own functions it looks, too, while
    another evaluates their frames, as `torch.compile` may, and so between a `return` and the
    assignment of what it returns.
    """

    __slots__ = (
        "_is_asked",
        "_is_over",
        "_is_sent",
        "_noted",
        "_on_the_way",
        "_previous",
    )

    def __init__(self) -> None:
        """Hold nothing yet."""
        self._previous: Any = None
        self._noted = self._is_over = self._is_asked = self._is_sent = False
        self._on_the_way: dict[FrameType, int | None] = {}

    def begin(self) -> None:
        """Hold it from now on, if there is a handler in Python that it would come to."""
        if self._previous is None and _this_thread() == _main_thread().ident:
            handler = _get(signal.SIGINT)
            if callable(handler):  # else the process ignores it, or ends by it
                self._previous = handler
                _set(signal.SIGINT, self._note)

    def __exit__(self, *error: object) -> None:
        """Put the handler back; what was held comes when the caller goes on."""
        if self._previous is None:
            return
        try:
            # looked at when none can be noted any more, or one that comes here were lost
            _set(signal.SIGINT, self._previous)
            if self._noted:
                self._send_later()
        except KeyboardInterrupt:  # it came just now
            if self._noted:
                raise
            self._send_later()
        finally:
            self._is_over = True

    def _note(self, number: int, frame: FrameType | None) -> None:
        way = self._way_out(frame)
        if self._noted or not way:
            self._previous(number, frame)
        self._noted, self._on_the_way = True, way

    def _way_out(self, frame: FrameType | None) -> dict[FrameType, int | None]:
        """Return the block's frame, and those that wait for it with the call that they are at.

        None of them if it is not running: a debugger may have broken off its very end.
        """
        way: dict[FrameType, int | None] = {}
        while frame is not None:
            if any(each is self for each in frame.f_locals.values()):
                way = {frame: None}  # a block is left at several calls
            elif way:
                way[frame] = frame.f_lasti
            frame = frame.f_back
        return way

    def _send_later(self) -> None:
        _set(signal.SIGINT, self._pass_on)
        threading.Thread(target=self._send, name="accelfn Ctrl-C", daemon=True).start()

    def _send(self) -> None:
        """Send it to the main thread until that says that the caller has the result.

        It is asked by a signal. Another thread must not look at its frames: CPython 3.11 clears
        one while it still says that it runs, and whoever meets it then reads freed memory.
        """
        main = _main_thread().ident
        while main is not None and not self._is_sent:
            self._is_asked, pause = True, _POLL
            signal.pthread_kill(main, signal.SIGINT)
            while self._is_asked:  # for long, where the next update holds it back
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_POLL)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        """Let it go to its handler, if the caller has the result; else it is sent again."""
        if self._is_over and self._has_arrived(frame):
            self._on_the_way = {}  # frames that know this block, and the caller's states
            if _get(signal.SIGINT) == self._pass_on:
                _set(signal.SIGINT, self._previous)
            self._is_sent, self._is_asked = True, False
            self._previous(number, frame)
        self._is_asked = False

    def _has_arrived(self, frame: FrameType | None) -> bool:
        """Whether no frame of the main thread is at the call still that began the block."""
        inner = None
        while frame is not None and frame not in self._on_the_way:
            frame, inner = frame.f_back, frame
        if frame is None:
            return True
        at = self._on_the_way[frame]
        # what is called from the same place again is the next update, which has not begun
        return at is not None and (at != frame.f_lasti or inner is not None)


def held(function: Callable[P, R]) -> Callable[P, R]:
    """Hold Ctrl-C back while a function runs; it goes outside of all other decorators."""

    @functools.wraps(function)
    def call(*given: P.args, **named: P.kwargs) -> R:
        with holding() as hold:
            hold.begin()
            return function(*given, **named)

    return call


# Whether an update is skipped: by all ranks alike, on the host or by the device itself.


def decided(
    update: Update, wish: Skip, engine: Engine
) -> tuple[Update, torch.Tensor | None]:
    """Return the update, skipped or not, or a flag by which the device will know."""
    grads, flag = update.grads, _agreed(wish, update.world)
    if _left_to_device(update, engine):
        return update.with_grads(grads.with_metrics(skipped=flag)), flag
    skip = bool(flag)
    noted = update.with_grads(grads.with_metrics(skipped=float(skip)))
    return attrs.evolve(noted, skipped=skip), None


def _agreed(skip: Skip, world: World) -> torch.Tensor:
    """Return 1 if any rank wants to skip, else 0, without reading it."""
    if not skip.agreed:
        all_reduce_([skip.flag], world, label="skip the update?")
    return (skip.flag != 0).to(torch.float32)


def _reads_at_once(device: torch.device) -> bool:
    return device.type == "cpu"


def _left_to_device(update: Update, engine: Engine) -> bool:
    """Whether the device skips the update by itself, so that nobody waits.

    It can where an update changes nothing beside the optimizer's state and buffers.
    """
    if _reads_at_once(update.world.device) or not engine.can_skip(update.grads):
        return False
    if "offloads" in update.state.setup.facts:  # its optimizer runs on the host
        return False
    told = {o.name: facts_of(o) for o in update.state.setup.owners["after_update"]}
    noted = {name for name, facts in told.items() if "sees_skips" in facts}
    kept = update.state.slots.items()
    return all("skips_on_device" in facts for facts in told.values()) and all(
        update.slots[name] is slot for name, slot in kept if name not in noted
    )


# The stages of an update, from gradients to the next state: each makes the next `Update`.
#
# This is where a state is donated: until the optimizer is reached, whatever raises leaves
# it as it was; from then on its lease is ended, unless it is known that nothing was
# changed.


_INTERRUPTED = (
    "Update {update} was interrupted before it was whole, so the tensors of this state may"
    " be partly updated. Load a checkpoint, or go on from a copy."
)
_BEFORE = (
    "A transform's after_update reads the state that it is given first: update.state is the one"
    " before, whose tensors are updated already."
)
_UNFINISHED = (
    "DeepSpeed holds these gradients on each rank. Let the last micro-batch of an update reduce"
    " them: value_and_grad(state, batch, into=grads), with sync=True."
)
_DONATED = (
    "This state was given to the step of update {update}, which updated its tensors in place."
    " Go on with the state that the step returned, which af.salvage(state) finds if it was"
    " lost; to keep one, take state.copy() before the step, or call step(state, batch,"
    " donate=False)."
)


def take(
    state: TrainState, grads: Grads, hold: Callable[[], None]
) -> tuple[TrainState, Mapping[str, Number]]:
    """Take the update of gradients; return the next state, and what transforms report.

    `hold` is called before the state is given away: from then on Ctrl-C would lose it.
    """
    with span("accelfn apply_grads"):
        planned, update = planned_for(_begun(state, grads))
        update = reduced(update)
        given, engine = update.grads, engine_of(state)
        try:
            update, flag = transformed(update), None
            if update.grads.taken.skip is not None:
                update, flag = decided(update, update.grads.taken.skip, engine)
            if update.skipped:
                hold()
                after = _left_out(state, update, given, engine)
            else:
                ready = engine.prepare(state, update.grads, planned)
                hold()
                opt_state = _stepped(state, ready, planned, flag, engine)
                if ready is not update.grads:
                    update = update.with_grads(ready)
                if ready.taken.is_held:
                    update = _told(update, engine, is_taken=opt_state is not None)
                if opt_state is None:
                    state.lease.restore()  # nothing was changed
                    after = _left_out(state, update, given, engine)
                else:
                    seen, params = (given, update.grads), engine.params
                    after = _after(
                        state, update, seen, opt_state, flag=flag, params=params
                    )
        finally:
            given.give_away()
            if given is not grads:
                grads.give_away()
        return after, update.grads.metrics


def take_in_backward(
    state: TrainState,
    compute: Callable[[], tuple[Metrics, Grads]],
    hold: Callable[[], None],
) -> tuple[TrainState, Metrics]:
    """Take an update while the backward pass runs: its optimizer steps are in `compute`.

    Args:
        state: given to the update as soon as the backward pass has a gradient.
        compute: runs forward and backward, and leaves the gradients' cursor and buffers.
        hold: is called before the backward pass, for Ctrl-C would lose the state from then on.
    """
    with span("accelfn step in backward"):
        state.lease.check()
        world, setup = state.definition.world, state.definition.setup
        if world.loss.size > 1 and not setup.owners["engine"]:
            raise GradsError(_unreduced(world.loss))
        engine = engine_of(state)
        planned, update = planned_for(Update(state=state, slots=_slots(state)))
        tried = state.num_tried
        engine.bind(state)
        live = engine.live_update
        assert live is not None  # noqa: S101 - asked by who composed it
        live.plan(planned, hold, lambda: begin_donation(state, tried))
        try:
            metrics, grads = compute()
        except BaseException:
            live.forget()  # it may not have come to the backward pass
            if state.lease.is_over:
                _undo(state, engine)
            raise
        grads.give_away()
        slots = {**update.slots, **grads.taken.slots}
        update = Update(state=state, slots=slots, grads=grads)
        return _after(state, update, (), engine.finish(grads)), metrics


def reduced(update: Update) -> Update:
    """Let the gradients be those of all ranks, as the setup says.

    Raises:
        GradsError: it does not say how; or what a `reduce` gave is no sum of all ranks.
    """
    grads, definition = update.grads, update.state.definition
    if grads.reduced or (definition.copy.size == 1 and not definition.setup.reduces):
        return update
    owners = definition.setup.owners["reduce"]
    if not owners:
        unfinished = grads.taken.is_held
        raise GradsError(_UNFINISHED if unfinished else _unreduced(definition.copy))
    owner = owners[0]
    if owner.reduce is None:
        if definition.trains_apart:
            raise GradsError(_unreduced(definition.copy))
        return update
    with span("accelfn reduce"):
        totals = _shown(grads.multiplied(), totals=True)
        sums, update = through("reduce", totals, update, Grads)
        sums = _shown(sums, totals=False)
        if "apart" not in facts_of(owner):
            _check_sums(owner, sums, update)
    return update.with_grads(sums)


def transformed(update: Update) -> Update:
    """Let the `grads` of transforms see, and change, the gradients of the mean."""
    if not update.state.definition.setup.owners["grads"] or update.grads.taken.is_held:
        return update  # the optimizer divides them, and may do all that is asked for
    update = update.with_grads(update.grads.divided())
    grads, update = through("grads", update.grads, update, Grads)
    return update.with_grads(grads)


def begin_donation(state: TrainState, update: int) -> None:
    """Let the state be used no more, for its tensors are about to change."""
    state.lease.end(StateDonatedError, _INTERRUPTED, update=update)


def ended(
    state: TrainState, after: TrainState, update: int, *grads: Grads
) -> TrainState:
    """Hand the tensors of a state over to the one after it, which is returned.

    Raises:
        StateError: the slot of a transform has tensors of the state itself, or of gradients.
    """
    if _slots(after) is not _slots(state):
        _check_slots(_slots(state), after, grads)
    activity = state.definition.world.connection.activity
    activity.is_between = True
    activity.num_updates += 1
    if state.definition.setup.owners["finalize"]:
        activity.on_close[state.name] = partial(_warn_of_owed, ref(after))
    state.lease.hand_over(after, StateDonatedError, _DONATED, update=update)
    return after


def _warn_of_owed(kept: "ref[TrainState]") -> None:
    """Warn if a world ends, ranks hold other parameters, and somebody still has the state."""
    state = kept()
    if state is None or state.definition.copies.size == 1:
        return
    for owner in state.definition.setup.owners["finalize"]:
        owes = facts_of(owner).get("owes")
        if owes and owes(state, state.slots[owner.name]) and state.world.is_main:
            advise(
                f"{owner!r}: the world was closed while the ranks hold different state.params in"
                f" {state.name!r}, at update {state.step}. Bring them together after the last"
                " step, before the world is closed: state = af.finalize(state)."
            )


def _check_slots(
    before: Mapping[str, Any], after: TrainState, grads: tuple[Grads, ...]
) -> None:
    """Look at slots that an update replaced: at the 1st, 2nd, 4th, 8th, ... change of each."""
    changes = after.definition.cache.slot_changes
    for owner in after.definition.setup:
        slot = _slots(after).get(owner.name)
        if slot is None or slot is before.get(owner.name):
            continue
        count = changes[owner.name] = changes.get(owner.name, 0) + 1
        if count & (count - 1) == 0:
            check_copied(owner, slot, after, *(each.tensors for each in grads))


def _begun(state: TrainState, grads: Grads) -> Update:
    slots, crossed = _slots(state), grads.taken.slots
    return Update(
        state=state, slots={**slots, **crossed} if crossed else slots, grads=grads
    )


def _slots(state: TrainState) -> dict[str, Any]:
    # the private field: a property would check the lease again
    return state._slots  # pyright: ignore[reportPrivateUsage]


def _stepped(
    state: TrainState,
    ready: Grads,
    planned: Assignments,
    flag: torch.Tensor | None,
    engine: Engine,
) -> OptState | None:
    """Step the optimizer; from here on the state is given away."""
    begin_donation(state, ready.taken.update)
    profiled = profiler._is_profiler_enabled  # pyright: ignore[reportPrivateUsage]
    try:
        with span("accelfn optimizer") if profiled else NOTHING:
            if state.definition.has_torchs_optimizer:
                return engine.update(ready, planned, flag)
            with draws_for(state, "optimizer"):  # as one that adds noise draws
                return engine.update(ready, planned, flag)
    except BaseException:
        _undo(state, engine)
        raise


def _after(
    state: TrainState,
    update: Update,
    grads: tuple[Grads, ...],
    opt_state: OptState,
    *,
    flag: torch.Tensor | None = None,
    params: Any = None,
) -> TrainState:
    """Return the state after an update that the optimizer has taken."""
    after = successor(update, state, opt_state, flag, params)
    if state.definition.setup.owners["after_update"]:
        try:
            after = through_state("after_update", after, update)
        except StateDonatedError as error:
            error.add_note(_BEFORE)
            raise
    return ended(state, after, update.grads.taken.update, *grads)


def _told(update: Update, engine: Engine, *, is_taken: bool) -> Update:
    """Return an update of gradients that nobody sees, with what its engine tells of it."""
    metrics = {**engine.reports(), "skipped": float(not is_taken)}
    update = update.with_grads(update.grads.with_metrics(**metrics))
    return attrs.evolve(update, skipped=not is_taken)


def _undo(state: TrainState, engine: Engine) -> None:
    """Let a state be used again after an update that raised before it changed anything."""
    if engine.is_undone():
        state.lease.restore()


def _left_out(
    state: TrainState, update: Update, given: Grads, engine: Engine
) -> TrainState:
    """Return the state as it is, after the batch; transforms may note that in their slots."""
    after = through_state("after_update", skipped(update, state), update)
    engine.discard()
    return ended(state, after, update.grads.taken.update, given)


def _shown(grads: Grads, *, totals: bool) -> Grads:
    """Return gradients that show their totals, or their mean."""
    return attrs.evolve(grads, taken=attrs.evolve(grads.taken, shows_totals=totals))


def _check_sums(owner: Any, sums: Grads, update: Update) -> None:
    """Raise unless `reduce` gave what is the same on all ranks, as far as can be seen.

    That takes a collective in the first update, and where the world is checked; simulated
    ranks compare without one.
    """
    if not sums.reduced:
        msg = (
            f"{owner!r}.reduce returned gradients of this rank's weight, by which each rank"
            " would divide its own, so that replicas drift apart. Return"
            " grads.with_sums(sums, weight): what af.reduce makes of grads.tensors and of"
            " grads.weight. If ranks are to differ, say so:"
            ' gives_up = {"replicas_agree": "..."}.'
        )
        raise GradsError(msg)
    cache = update.state.definition.cache
    check_sums(
        sums.as_taken,
        sums.taken.divisor,
        update.world,
        label=f"what {owner!r}.reduce returned in update {update.num_tried}",
        is_first=not cache.compared_sums,
    )
    cache.compared_sums = True


def _unreduced(ranks: World) -> str:
    return (
        f"The gradients are not reduced over the {ranks.size} ranks. Add"
        " af.wrap_ddp(), af.wrap_fsdp() or af.local_sgd(sync_every=...) to the setup, or"
        " call af.sync_grads(state, grads) before apply_grads."
    )


class Step(Protocol):
    """What `make_step` returns."""

    def __call__(
        self, state: TrainState, batch: Any, /, *extras: Any, donate: bool = True
    ) -> tuple[TrainState, Metrics]:
        """Take one update; the given state is donated unless told otherwise."""
        ...


@explain_call_errors
def make_step(loss_fn: LossFunction, *, count: Count | None = None) -> Step:
    """Return a function that takes one optimizer update: `(state, batch) -> (state, metrics)`.

    `loss_fn(model, batch, *extras)` gets the plain module, whatever engine runs it, and
    returns the mean over the batch's samples, or `af.Loss(total, weight)`. With
    `count=fn` it also gets what `fn` counts in the whole update; see `value_and_grad`.

    The returned step takes a batch of `af.batches`, or any plain value (under
    `accumulate` a list of them), then extras for the loss, and `donate=`. It updates the
    state's tensors in place and returns them in a new state; the given one then raises
    `StateDonatedError`. With `donate=False` it works on a copy. A step that raises before
    its update leaves the given state as it was, buffers included. The caller's `no_grad`,
    `inference_mode` and `autocast` do not touch it.

    Law: the result depends on (state, batch, extras) alone.

    Cost: what the hand-written loop costs; docs/benchmarks.md has the figures.

    Raises:
        LossError: the loss is not a scalar, or has no gradient.
        NonFiniteLossError: it is infinite or not a number (looked at on the CPU).
        BatchError: the batch does not follow the state's cursor.
        StateDonatedError: the state was given to a step before.
        GradsError: the world has several ranks and nothing reduces gradients over them.
    """
    compute = gradients_of(loss_fn, count)

    def step(
        state: TrainState, batch: Any, /, *extras: Any, donate: bool = True
    ) -> tuple[TrainState, Metrics]:
        check_state("step(state, batch)", state)
        if not donate:
            state = state.copy()
        definition = state.definition
        with holding() as hold, own_modes(definition.world.device):
            if "steps_in_backward" in definition.setup.facts:
                return take_in_backward(
                    state, lambda: compute(state, batch, *extras), hold.begin
                )
            metrics, grads = compute(state, batch, *extras)
            if definition.setup.owners["value_and_grad"]:
                check_update(state, grads)  # a user's own may return anything
            state, reported = take(state, grads, hold.begin)
            return state, metrics.with_values(reported) if reported else metrics

    return step


@explain_call_errors
def build(state: TrainState) -> TrainState:
    """Build the engine now, so that what it refuses is said before the first step.

    Raises:
        ReplicaMismatchError: the ranks hold different models.
    """
    check_state("af.build(state)", state)
    state.lease.check()
    with own_modes(state.definition.world.device):
        engine_of(state).bind(state)
    return state


@explain_call_errors
def release(state: TrainState) -> None:
    """Drop the engine of the state and its kin early; the next step makes a new one."""
    check_state("af.release(state)", state)
    state.definition.cache.clear()


# `apply_grads` and `finalize`: the states after an update, and after the last one.


@held
@explain_call_errors
def apply_grads(state: TrainState, grads: Grads) -> TrainState:
    """Take one optimizer update: `(state, grads) -> state`.

    Gradients are divided by their weight, pass through the setup's `grads` transforms, and
    go to the optimizer; then `after_update` transforms run. The given state and gradients
    are donated.

    Raises:
        GradsError: they were taken at another update, or are not reduced in a world of
            several ranks.
        StateDonatedError: the state was given to a step before.
    """
    check_state("af.apply_grads(state, grads)", state)
    state.lease.check()
    check_update(state, grads)
    with own_modes(state.definition.world.device):
        return take(state, grads, _held_already)[0]


def _held_already() -> None: ...


@held
@explain_call_errors
def finalize(state: TrainState) -> TrainState:
    """Return the state with what its transforms owe at the end, as a last average.

    The given state is donated, unless nothing is owed: then it is returned.
    """
    check_state("af.finalize(state)", state)
    state.lease.check()
    if not state.definition.setup.owners["finalize"]:
        return state
    with own_modes(state.definition.world.device):
        after = attrs.evolve(state, lease=Lease())
        update = Update(state=state, slots=after.slots)
        begin_donation(state, state.num_tried)
        after = through_state("finalize", after, update)
        return ended(state, after, state.num_tried)


# `sync_grads`: gradients of this rank into those of all, for custom steps.


@explain_call_errors
def sync_grads(state: TrainState, grads: Grads) -> Grads:
    """Reduce gradients over the ranks of the state's world, exactly by weight.

    Where copies of several ranks each train apart, over those of this rank's copy.

    For custom steps that took them with `sync=False`, or without `wrap_ddp`.

    Cost: one all-reduce of all gradients, flattened, and one of their weight; the first time,
        a few small ones by which ranks compare their setups, and at update 0 their parameters.

    Law: what `wrap_ddp` gives.

    Raises:
        GradsError: they are reduced already, sparse, or not this state's.
        ReplicaMismatchError: the ranks' setups, optimizers, schedules, seeds or data differ.
        PeerFailedError: another rank failed.
    """
    check_state("af.sync_grads(state, grads)", state)
    state.lease.check()
    check_update(state, grads)
    ranks = state.definition.copy
    if ranks.size == 1:
        return attrs.evolve(grads, reduced=True)
    if grads.taken.is_held:
        msg = (
            "sync_grads: DeepSpeed holds these gradients. Let the last micro-batch reduce them:"
            " value_and_grad(state, batch, into=grads), with sync=True."
        )
        raise GradsError(msg)
    if grads.reduced:
        msg = "sync_grads: these gradients are reduced over the ranks already."
        raise GradsError(msg)
    names = state.definition.skeleton.trainable
    sparse = [name for name, grad in grads.as_taken.items() if grad.is_sparse]
    if sparse:
        msg = (
            f"sync_grads: the gradients of {', '.join(sparse[:5])} are sparse. Make those"
            " layers with sparse=False, or let af.wrap_ddp() reduce them."
        )
        raise GradsError(msg)
    if any("dp_shard" in cut_axes(grad) for grad in grads.as_taken.values()):
        msg = (
            "sync_grads: these gradients are parts, summed over the ranks already, of"
            ' micro-batches under af.wrap_fsdp(accumulate="sharded"); their weight alone is'
            ' not. Let the last micro-batch reduce (sync=True), or take accumulate="whole".'
        )
        raise GradsError(msg)
    compare(state)
    taken = grads.taken
    factor = taken.scale if taken.lease.is_mean else 1
    with own_modes(ranks.device):
        totals = {
            name: local(grads.as_taken[name]) * factor
            if name in grads.as_taken
            else _zeros(state, name)
            for name in names
        }
        told = [float(name in grads.as_taken) for name in names]
        counts = torch.tensor([0.0, *told], dtype=torch.float64, device=ranks.device)
        counts[0] = taken.divisor
        with span("accelfn reduce"):
            all_reduce_([*totals.values(), counts], ranks, label="sync_grads")
        # a parameter that took part on no rank has no gradient
        if len(grads.as_taken) < len(names):
            took_part = zip(names, counts[1:].tolist(), strict=True)
            totals = {name: totals[name] for name, some in took_part if some}
        layout = state.definition.layout
        if layout is not None:
            totals = {name: layout.laid(name, total) for name, total in totals.items()}
    taken = attrs.evolve(taken, divisor=counts[0], lease=Lease())
    return attrs.evolve(grads, tensors=totals, taken=taken, reduced=True)


def _zeros(state: TrainState, name: str) -> torch.Tensor:
    """Return a gradient of nothing, in the shape in which a rank computes."""
    layout, param = state.definition.layout, state.params[name]
    shape = param.shape if layout is None else layout.computed(name)
    return torch.zeros(shape, dtype=param.dtype, device=state.world.device)
