# SPDX-License-Identifier: Apache-2.0
"""`apply_grads`: gradients into the next state, by way of the transforms and the optimizer.

This is where a state is donated: until the optimizer is reached, whatever raises leaves it
as it was; from then on its lease is ended, unless it is known that nothing was changed.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs
import torch

from accelfn.base.calling import called
from accelfn.base.contexts import own_modes, span
from accelfn.collectives import all_reduce_, check_sums
from accelfn.definition.fields import pair
from accelfn.definition.transform import chain
from accelfn.engine.engine import Engine, engine_of
from accelfn.errors import GradsError, StateDonatedError
from accelfn.state.grads import Grads, divide_
from accelfn.state.hyper import planned_for
from accelfn.state.lease import Lease
from accelfn.state.metrics import Metrics, Number
from accelfn.state.shared_draws import shared_draws
from accelfn.state.state import OptState, TrainState, check_state
from accelfn.state.succession import changed, fill
from accelfn.step.holding import held
from accelfn.step.skipping import counts_after, decided
from accelfn.step.value_and_grad import check_update
from accelfn.world import World

_INTERRUPTED = (
    "Update {update} was interrupted before it was whole, so the tensors of this state may"
    " be partly updated. Load a checkpoint, or go on from a copy."
)
_DONATED = (
    "This state was given to the step of update {update}, which updated its tensors in place."
    " Go on with the state that the step returned, which af.salvage(state) finds if it was"
    " lost; to keep one, take state.copy() before the step, or call step(state, batch,"
    " donate=False)."
)


@held
@called
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
    return update_state(state, grads, _held_already)[0]


def _held_already() -> None: ...


def update_state(
    state: TrainState, grads: Grads, hold: Callable[[], None]
) -> tuple[TrainState, Mapping[str, Number]]:
    """Take one update, and return what transforms report beside the state.

    `hold` is called before the state is given away: from then on Ctrl-C would lose it.
    """
    with own_modes(state.definition.world.device), span("accelfn apply_grads"):
        return _updated(state, grads, hold)


def _updated(
    state: TrainState, grads: Grads, hold: Callable[[], None]
) -> tuple[TrainState, Mapping[str, Number]]:
    lease, definition = state.lease, state.definition
    lease.check()
    check_update(state, grads)
    setup = definition.setup
    # private fields are read here: properties would check the lease field by field
    slots = state._slots  # pyright: ignore[reportPrivateUsage]
    slots = {**slots, **grads.slots} if grads.slots else slots
    planned, hyper = planned_for(state, slots)
    grads, slots = _reduced(state, grads, setup, slots)
    given = grads
    try:
        engine = engine_of(state)
        is_plain = grads.loss_scale is None and not setup.having("grads")
        later = is_plain and engine.divides(grads.divisor)
        if grads.tensors and not grads.is_mean and not later:
            # of a weight of 0 they are zeros, and stay that
            divide_(grads.tensors.values(), grads.scale)
            grads = attrs.evolve(grads, is_mean=True, loss_scale=None)
        grads, slots = _transformed(state, grads, setup, slots)
        skip, flag = decided(state, grads, slots)
        if skip:
            hold()
            return _skipped(state, grads, given, slots)
        if grads.skip is not None:
            grads = grads.with_metrics(skipped=0.0 if flag is None else flag)
        assignments = engine.prepare(state, grads, planned, hyper)
    except BaseException:
        given.give_away()
        raise
    hold()
    given.give_away()
    lease.end(StateDonatedError, _INTERRUPTED, update=state.num_tried)
    try:
        opt_state = engine.update(grads, assignments, flag)
    except BaseException:
        _undo(engine, lease)
        raise
    return _after(state, grads, opt_state, slots, flag), grads.metrics


def step_in_backward(
    state: TrainState,
    compute: Callable[[], tuple[Metrics, Grads]],
    hold: Callable[[], None],
) -> tuple[TrainState, Metrics]:
    """Take an update while a backward pass runs, by what `optimizer_in_backward` planned.

    Args:
        state: given to the update as soon as the backward pass has a gradient.
        compute: runs forward and backward, and leaves the gradients' cursor and buffers.
        hold: is called before the backward pass, for Ctrl-C would lose the state from then on.
    """
    with own_modes(state.definition.world.device), span("accelfn step in backward"):
        lease, setup = state.lease, state.definition.setup
        lease.check()
        slots = state._slots  # pyright: ignore[reportPrivateUsage]
        if state.definition.world.size > 1 and not setup.having("engine"):
            raise GradsError(_unreduced(state.definition.world))
        engine = engine_of(state)

        def begin() -> None:
            lease.end(StateDonatedError, _INTERRUPTED, update=state.num_tried)

        engine.plan(state, *planned_for(state, slots), hold, begin)
        try:
            metrics, grads = compute()
        except BaseException:
            engine.forget_plan()  # it may not have come to the backward pass
            if lease.is_over:
                _undo(engine, lease)
            raise
        grads.give_away()
        slots = {**slots, **grads.slots} if grads.slots else slots
        return _after(state, grads, engine.finish(grads), slots, None), metrics


def _undo(engine: Engine, lease: Lease) -> None:
    """Let a state be used again after an update that raised before it changed anything."""
    if engine.is_undone():
        lease.restore()


def _after(
    state: TrainState,
    grads: Grads,
    opt_state: OptState,
    slots: dict[str, Any],
    flag: torch.Tensor | None,
) -> TrainState:
    """Return the state after an update that the optimizer has taken."""
    definition = state.definition
    step, num_skipped = counts_after(state, flag)
    after = object.__new__(TrainState)
    fill(
        after,
        params=state._params,  # pyright: ignore[reportPrivateUsage]
        buffers=state._buffers,  # pyright: ignore[reportPrivateUsage]
        opt_state=opt_state,
        step=step,
        cursor=state.cursor if grads.cursor is None else grads.cursor,
        seed=state.seed,
        num_skipped=num_skipped,
        slots=slots,
        definition=definition,
        lease=Lease(),
    )
    after = _after_update(after, definition.setup)
    definition.world.connection.is_between = True
    _hand_over(state, after)
    return after


def _hand_over(state: TrainState, after: TrainState) -> None:
    """Let the given state be used no more, for its tensors are the next one's."""
    error, update = StateDonatedError, state.num_tried
    state.lease.hand_over(after, error, _DONATED, update=update)


def _reduced(
    state: TrainState, grads: Grads, setup: chain, slots: dict[str, Any]
) -> tuple[Grads, dict[str, Any]]:
    """Return gradients that may be applied: reduced over ranks as the setup says."""
    world = state.definition.world
    if grads.reduced or world.size == 1:
        return grads, slots
    owners = setup.having("reduce")
    if not owners:
        raise GradsError(_unreduced(world))
    owner = owners[0]
    if owner.reduce is None:
        return grads, slots
    with shared_draws(state, "reduce", owners), torch.no_grad():
        returned = owner.reduce(grads, slots.get(owner.name), world)
    reduced, slot = pair(owner, "reduce", returned, Grads)
    if "replicas_agree" not in getattr(type(owner), "gives_up", ()):
        _check_sums(owner, reduced, state)
    return reduced, _with(slots, owner.name, slot)


def _check_sums(owner: Any, reduced: Grads, state: TrainState) -> None:
    """Raise unless `reduce` gave what is the same on all ranks, as far as can be seen.

    That takes a collective in the first update, and where the world is checked; simulated
    ranks compare without one.
    """
    if not reduced.reduced:
        msg = (
            f"{owner!r}.reduce returned gradients of this rank's weight, by which each rank"
            " would divide its own, so that replicas drift apart. Return"
            " grads.with_sums(sums, weight): what af.reduce makes of grads.tensors and of"
            " grads.weight. If ranks are to differ, say so:"
            ' gives_up = {"replicas_agree": "..."}.'
        )
        raise GradsError(msg)
    check_sums(
        reduced.tensors,
        reduced.divisor,
        state.definition.world,
        label=f"what {owner!r}.reduce returned in update {state.num_tried}",
        is_first=not state.definition.cache.compared_sums,
    )
    state.definition.cache.compared_sums = True


def _unreduced(world: World) -> str:
    return (
        f"The gradients are not reduced over the {world.size} ranks. Add"
        " af.wrap_ddp() or af.local_sgd(sync_every=...) to the setup, or call"
        " af.sync_grads(state, grads) before apply_grads."
    )


def _transformed(
    state: TrainState, grads: Grads, setup: chain, slots: dict[str, Any]
) -> tuple[Grads, dict[str, Any]]:
    owners = setup.having("grads")
    if not owners:
        return grads, slots
    with shared_draws(state, "grads", owners), torch.no_grad():
        for each in owners:
            returned = each.grads(grads, slots.get(each.name), state)
            grads, slot = pair(each, "grads", returned, Grads)
            slots = _with(slots, each.name, slot)
    return grads, slots


def _skipped(
    state: TrainState, grads: Grads, given: Grads, slots: Mapping[str, Any]
) -> tuple[TrainState, Mapping[str, Number]]:
    """Return the state as it is, after the batch; transforms may note that in their slots."""
    kept = dict(state.slots)
    owners = state.definition.setup.having("after_skip")
    with shared_draws(state, "after_skip", owners), torch.no_grad():
        for each in owners:
            slot = each.after_skip(grads, slots.get(each.name), state)
            kept = _with(kept, each.name, slot)
    given.give_away()
    engine_of(state).discard()
    after = changed(
        state,
        cursor=state.cursor if grads.cursor is None else grads.cursor,
        step=state.step,
        num_skipped=state.num_skipped + 1,
        slots=kept,
        lease=Lease(),
    )
    state.definition.world.connection.is_between = True
    _hand_over(state, after)
    return after, grads.with_metrics(skipped=1.0).metrics


def _after_update(state: TrainState, setup: chain) -> TrainState:
    owners = setup.having("after_update")
    if not owners:
        return state
    return _called(state, "after_update", owners)


def _called(state: TrainState, field: str, owners: Iterable[Any]) -> TrainState:
    """Return the state after those who have a say in it, in order."""
    with shared_draws(state, field, owners), torch.no_grad():
        for each in owners:
            slot = state.slots.get(each.name)
            returned = getattr(each, field)(state, slot)
            state, new_slot = pair(each, field, returned, TrainState)
            if new_slot is not slot:
                state = with_own_slot(state, each.name, new_slot)
    return state


def with_own_slot(state: TrainState, name: str, slot: Any) -> TrainState:
    """Return the state with a transform's slot; None leaves it without one."""
    return changed(state, slots=_with(dict(state.slots), name, slot))


def _with(slots: dict[str, Any], name: str, slot: Any) -> dict[str, Any]:
    if slot is None and name not in slots:
        return slots
    return {**slots, name: slot}


@held
@called
def finalize(state: TrainState) -> TrainState:
    """Return the state with what its transforms owe at the end, as a last average.

    The given state is donated, unless nothing is owed: then it is returned.
    """
    check_state("af.finalize(state)", state)
    state.lease.check()
    owners = state.definition.setup.having("finalize")
    if not owners:
        return state
    with own_modes(state.definition.world.device):
        after = attrs.evolve(state, lease=Lease())
        state.lease.end(StateDonatedError, _INTERRUPTED, update=state.num_tried)
        after = _called(after, "finalize", owners)
        _hand_over(state, after)
    return after


@called
def sync_grads(state: TrainState, grads: Grads) -> Grads:
    """Reduce gradients over the ranks of the state's world, exactly by weight.

    For custom steps that took them with `sync=False`, or without `wrap_ddp`.

    Cost: one all-reduce of all gradients, flattened, and one of their weight.

    Law: what `wrap_ddp` gives.

    Raises:
        GradsError: they are reduced already, sparse, or not this state's.
        PeerFailedError: another rank failed.
    """
    check_state("af.sync_grads(state, grads)", state)
    state.lease.check()
    check_update(state, grads)
    world = state.definition.world
    if world.size == 1:
        return grads
    if grads.reduced:
        msg = "sync_grads: these gradients are reduced over the ranks already."
        raise GradsError(msg)
    params = state.params
    names = state.definition.skeleton.trainable
    sparse = [name for name, grad in grads.tensors.items() if grad.is_sparse]
    if sparse:
        msg = (
            f"sync_grads: the gradients of {', '.join(sparse[:5])} are sparse. Make those"
            " layers with sparse=False, or let af.wrap_ddp() reduce them."
        )
        raise GradsError(msg)
    factor = grads.divisor if grads.is_mean else 1
    with own_modes(world.device):
        totals = {
            name: grads.tensors[name] * factor
            if name in grads.tensors
            else torch.zeros_like(params[name])
            for name in names
        }
        told = [float(name in grads.tensors) for name in names]
        counts = torch.tensor([0.0, *told], dtype=torch.float64, device=world.device)
        counts[0] = grads.divisor
        all_reduce_([*totals.values(), counts], world, label="sync_grads")
        # a parameter that took part on no rank has no gradient
        if len(grads.tensors) < len(names):
            took_part = zip(names, counts[1:].tolist(), strict=True)
            totals = {name: totals[name] for name, some in took_part if some}
    return attrs.evolve(
        grads, tensors=totals, divisor=counts[0], is_mean=False, reduced=True
    )
