# SPDX-License-Identifier: Apache-2.0
"""The stages of an update, from gradients to the next state: each makes the next `Update`.

This is where a state is donated: until the optimizer is reached, whatever raises leaves it
as it was; from then on its lease is ended, unless it is known that nothing was changed.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from weakref import ref

import attrs
import torch
from torch.autograd import profiler

from accelfn.base.advice import advise
from accelfn.base.contexts import NOTHING, span
from accelfn.collectives import check_sums
from accelfn.definition.facts import facts_of
from accelfn.definition.slots import check_copied
from accelfn.engine.building import engine_of
from accelfn.engine.engine import Engine
from accelfn.errors import GradsError, StateDonatedError
from accelfn.state.grads import Grads
from accelfn.state.hyper import planned_for
from accelfn.state.metrics import Metrics, Number
from accelfn.state.shared_draws import draws_for
from accelfn.state.state import TrainState
from accelfn.state.succession import skipped, successor, through_state
from accelfn.state.update import Update, through
from accelfn.state.values import OptState
from accelfn.step.skipping import decided
from accelfn.structure.prototype import Assignments
from accelfn.world import World

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
