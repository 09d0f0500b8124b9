# SPDX-License-Identifier: Apache-2.0
"""The step: gradients of a loss, then an update; two public functions and their product.

`make_step(loss_fn)` is `value_and_grad(loss_fn)` followed by `apply_grads`, nothing else,
so SAM, a GAN or distillation are a few lines of a user's own code.
"""

import math
from collections.abc import Mapping
from typing import Any, Protocol

import attrs
import torch

from accelfn import foreach, streams
from accelfn.collectives import all_reduce_
from accelfn.data import Batch
from accelfn.engine.engine import engine_of
from accelfn.engine.read_loss import Samples
from accelfn.engine.runner import LossFunction
from accelfn.errors import ArgumentError, BatchError, GradsError, StateDonatedError
from accelfn.grads import Grads
from accelfn.lease import Lease
from accelfn.loss import Metrics, Number
from accelfn.modes import own_modes
from accelfn.optimizer import Hyper
from accelfn.state import TrainState
from accelfn.transform import chain


class ValueAndGrad(Protocol):
    """What `value_and_grad` returns, and transforms of that name wrap."""

    def __call__(
        self,
        state: TrainState,
        batch: Any,
        /,
        *extras: Any,
        into: Grads | None = None,
        sync: bool = True,
    ) -> tuple[Metrics, Grads]:
        """Return metrics and gradients; the state stays as it was."""
        ...


class Step(Protocol):
    """What `make_step` returns."""

    def __call__(
        self, state: TrainState, batch: Any, /, *extras: Any, donate: bool = True
    ) -> tuple[TrainState, Metrics]:
        """Take one update; the given state is donated unless told otherwise."""
        ...


def make_step(loss_fn: LossFunction) -> Step:
    """Return a function that takes one optimizer update: `(state, batch) -> (state, metrics)`.

    `loss_fn(model, batch, *extras)` gets the plain module, whatever engine runs it, and
    returns the mean over the batch's samples, or `af.Loss(total, weight)`.

    The returned step takes a batch of `af.batches`, or any plain value (under
    `accumulate` a list of them), then extras for the loss, and `donate=`. It updates the
    state's tensors in place and returns them in a new state; the given one then raises
    `StateDonatedError`. With `donate=False` it works on a copy. A step that raises before
    its update leaves the given state as it was, buffers included. The caller's `no_grad`,
    `inference_mode` and `autocast` do not touch it.

    Law: the result depends on (state, batch, extras) alone.

    Cost: what the hand-written loop costs, and some 15 µs.

    Raises:
        LossError: the loss is not a scalar, or has no gradient.
        NonFiniteLossError: it is infinite or not a number (looked at on the CPU).
        BatchError: the batch does not follow the state's cursor.
        StateDonatedError: the state was given to a step before.
        GradsError: the world has several ranks and nothing reduces gradients over them.
    """
    compute = value_and_grad(loss_fn)

    def step(
        state: TrainState, batch: Any, /, *extras: Any, donate: bool = True
    ) -> tuple[TrainState, Metrics]:
        if not donate:
            state = state.copy()
        metrics, grads = compute(state, batch, *extras)
        state, reported = _update(state, grads)
        return state, metrics.with_values(reported) if reported else metrics

    return step


def value_and_grad(loss_fn: LossFunction) -> ValueAndGrad:
    """Return a function that gives a loss's metrics and gradients, and changes nothing.

    With `into=grads` it adds to gradients taken before (which are given away), with
    `sync=False` it leaves them on this rank: so several backward passes cost one
    reduction. What it returns goes to `apply_grads`.

    Acts on: nothing; `loss` and `value_and_grad` of the setup's transforms wrap it.

    Raises:
        GradsError: `into` is reduced over ranks already; adding to it would make the
            replicas drift.
        LossError, NonFiniteLossError, BatchError, StateDonatedError: as `make_step`.
    """
    if not callable(loss_fn):
        msg = (
            f"value_and_grad({loss_fn!r}): expected a function (model, batch, *extras)"
            " -> loss."
        )
        raise ArgumentError(msg)

    def compute(
        state: TrainState,
        batch: Any,
        /,
        *extras: Any,
        into: Grads | None = None,
        sync: bool = True,
    ) -> tuple[Metrics, Grads]:
        state.lease.check()
        composed = state.definition.cache.get(compute)
        if composed is None:
            composed = _compose(loss_fn, state.definition.setup)
            state.definition.cache[compute] = composed
        return composed(state, batch, *extras, into=into, sync=sync)

    return compute


def _compose(loss_fn: LossFunction, setup: chain) -> ValueAndGrad:
    """Return the gradient function as the setup's transforms wrap it."""
    composed: ValueAndGrad = _innermost(wrap_loss(loss_fn, setup), setup)
    for each in reversed(setup.having("value_and_grad")):
        composed = each.value_and_grad(composed)
    return composed


def wrap_loss(loss_fn: LossFunction, setup: chain) -> LossFunction:
    """Return a function of (model, batch, ...) as the setup's transforms wrap losses."""
    for each in reversed(setup.having("loss")):
        loss_fn = each.loss(loss_fn)
    return loss_fn


def _innermost(loss_fn: LossFunction, setup: chain) -> ValueAndGrad:
    reducers = setup.having("reduce")
    reduces_by_mean = not reducers
    stays_local = bool(reducers) and reducers[0].reduce is None

    def compute(
        state: TrainState,
        batch: Any,
        /,
        *extras: Any,
        into: Grads | None = None,
        sync: bool = True,
    ) -> tuple[Metrics, Grads]:
        if into is not None:
            _check_update(state, into)
        if into is not None and into.reduced and state.definition.world.size > 1:
            msg = (
                "value_and_grad(into=grads): these gradients are reduced over the ranks"
                " already, so what is added now would not be. Take them with"
                " sync=False."
            )
            raise GradsError(msg)
        alone = stays_local or state.definition.world.size == 1
        lone = into is None and sync and alone
        if isinstance(batch, Batch):
            _check_follows(state, batch, into)
            samples = Samples(batch.value, batch.weights[0], lone)
            cursor = batch.cursor
        else:
            samples = Samples(batch, None, lone)
            cursor = None if into is None else into.cursor
        with own_modes(state.definition.world.device):
            return engine_of(state).value_and_grad(
                state,
                loss_fn,
                extras,
                samples=samples,
                into=into,
                sync=sync and reduces_by_mean,
                cursor=cursor,
            )

    return compute


def _check_follows(state: TrainState, batch: Batch, into: Grads | None) -> None:
    start = batch.start
    if start == state.cursor or (into is not None and start == into.cursor):
        return
    msg = (
        f"This batch begins at epoch {start.epoch} sample {start.samples}, but the"
        f" state stands at epoch {state.cursor.epoch} sample {state.cursor.samples}."
        " Start af.batches(state) again from this state."
    )
    raise BatchError(msg)


def sync_grads(state: TrainState, grads: Grads) -> Grads:
    """Reduce gradients over the ranks of the state's world, exactly by weight.

    For custom steps that took them with `sync=False`, or without `wrap_ddp`.

    Cost: one all-reduce of all gradients, flattened, and their weight.

    Law: what `wrap_ddp` gives.

    Raises:
        GradsError: they are reduced already, or not this state's.
        PeerFailedError: another rank failed.
    """
    state.lease.check()
    _check_update(state, grads)
    world = state.definition.world
    if world.size == 1:
        return grads
    if grads.reduced:
        msg = "sync_grads: these gradients are reduced over the ranks already."
        raise GradsError(msg)
    params = state.params
    totals = {
        name: (
            grads.tensors[name] * (grads.divisor if grads.is_mean else 1)
            if name in grads.tensors
            else torch.zeros_like(params[name])
        )
        for name in state.definition.skeleton.trainable
    }
    weight = torch.as_tensor(
        grads.divisor, dtype=torch.float64, device=world.device
    ).reshape(1)
    all_reduce_([*totals.values(), weight], world, label="sync_grads")
    return attrs.evolve(
        grads, tensors=totals, divisor=weight[0], is_mean=False, reduced=True
    )


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
    return _update(state, grads)[0]


def _update(state: TrainState, grads: Grads) -> tuple[TrainState, Mapping[str, Number]]:
    """Take one update, and return what transforms report beside the state."""
    with own_modes(state.definition.world.device):
        return _updated(state, grads)


def _updated(
    state: TrainState, grads: Grads
) -> tuple[TrainState, Mapping[str, Number]]:
    lease, definition = state.lease, state.definition
    lease.check()
    _check_update(state, grads)
    setup = definition.setup
    # private fields are read here: properties would check the lease field by field
    slots = state._slots  # pyright: ignore[reportPrivateUsage]
    factor, hyper = _factor(state), _hyper(state, setup, slots)
    given = grads
    try:
        grads, slots = _reduced(state, grads, setup, slots)
        grads = _divided(grads)
        grads, slots = _transformed(state, grads, setup, slots)
        engine = engine_of(state)
        assignments = engine.prepare(state, grads, factor, hyper)
    except BaseException:
        given.give_away("an update that raised")
        raise
    given.give_away("an update")
    lease.end(_interrupted(state))
    opt_state = engine.update(grads, assignments)
    after = TrainState(
        params=state._params,  # pyright: ignore[reportPrivateUsage]
        buffers=state._buffers,  # pyright: ignore[reportPrivateUsage]
        opt_state=opt_state,
        step=state.step + 1,
        cursor=state.cursor if grads.cursor is None else grads.cursor,
        seed=state.seed,
        slots=slots,
        definition=definition,
        lease=Lease(),
    )
    after = _after_update(after, setup)
    lease.end(_donated(state))
    return after, grads.metrics


def _interrupted(state: TrainState) -> StateDonatedError:
    msg = (
        f"Update {state.step} was interrupted before it was whole, so the tensors of this"
        " state are partly updated. Load a checkpoint, or go on from a copy."
    )
    return StateDonatedError(msg)


def _donated(state: TrainState) -> StateDonatedError:
    msg = (
        f"This state was given to the step of update {state.step}, which updated its"
        " tensors in place. Go on with the state that the step returned; to keep one,"
        " take state.copy() before the step, or call step(state, batch, donate=False)."
    )
    return StateDonatedError(msg)


def _check_update(state: TrainState, grads: Grads) -> None:
    if not isinstance(grads, Grads):
        msg = f"Expected the Grads that value_and_grad returned, got {type(grads).__name__}."
        raise GradsError(msg)
    grads.lease.check()
    if grads.update != state.step:
        msg = (
            f"These gradients were taken at update {grads.update}, but the state is at"
            f" update {state.step}."
        )
        raise GradsError(msg)


def _factor(state: TrainState) -> float | None:
    """Return the schedule's factor of this update."""
    schedule = state.definition.schedule
    if schedule is None:
        return None
    factor = schedule(state.step)
    if not isinstance(factor, (int, float)) or not math.isfinite(factor):
        msg = (
            f"The schedule gave {factor!r} for update {state.step}; expected a finite"
            " number, the factor of the learning rate."
        )
        raise ArgumentError(msg)
    return factor


def _hyper(state: TrainState, setup: chain, slots: Mapping[str, Any]) -> Hyper:
    hyper: dict[Any, Any] = {}
    for each in setup.having("hyper"):
        hyper.update(each.hyper(state, slots.get(each.name)))
    return hyper


def _reduced(
    state: TrainState, grads: Grads, setup: chain, slots: dict[str, Any]
) -> tuple[Grads, dict[str, Any]]:
    """Return gradients that may be applied: reduced over ranks as the setup says."""
    world = state.definition.world
    if grads.reduced or world.size == 1:
        return grads, slots
    owners = setup.having("reduce")
    if not owners:
        msg = (
            f"The gradients are not reduced over the {world.size} ranks. Add"
            " af.wrap_ddp() or af.local_sgd(sync_every=...) to the setup, or call"
            " af.sync_grads(state, grads) before apply_grads."
        )
        raise GradsError(msg)
    owner = owners[0]
    if owner.reduce is None:
        return grads, slots
    reduced, slot = owner.reduce(grads, slots.get(owner.name), world)
    return attrs.evolve(reduced, reduced=True), _with(slots, owner.name, slot)


def _divided(grads: Grads) -> Grads:
    """Return the gradients of the mean; of a weight of 0, zeros."""
    if grads.is_mean or not grads.tensors:
        return grads
    divisor = grads.divisor
    if isinstance(divisor, torch.Tensor):
        divisor = divisor.to(next(iter(grads.tensors.values())).dtype)
        # what has no weight counts for nothing
        divisor = divisor.masked_fill(divisor == 0, math.inf)
        foreach.div_(grads.tensors.values(), divisor)
    elif divisor not in (0, 1):
        foreach.div_(grads.tensors.values(), divisor)
    return attrs.evolve(grads, is_mean=True)


def _transformed(
    state: TrainState, grads: Grads, setup: chain, slots: dict[str, Any]
) -> tuple[Grads, dict[str, Any]]:
    owners = setup.having("grads")
    if not owners:
        return grads, slots
    with (
        streams.stream(_shared_seed(state, "grads"), state.definition.world.device),
        torch.no_grad(),
    ):
        for each in owners:
            grads, slot = each.grads(grads, slots.get(each.name), state)
            slots = _with(slots, each.name, slot)
    return grads, slots


def _after_update(state: TrainState, setup: chain) -> TrainState:
    owners = setup.having("after_update")
    if not owners:
        return state
    with (
        streams.stream(
            _shared_seed(state, "after_update"), state.definition.world.device
        ),
        torch.no_grad(),
    ):
        for each in owners:
            state, slot = each.after_update(state, state.slots.get(each.name))
            state = with_own_slot(state, each.name, slot)
    return state


def with_own_slot(state: TrainState, name: str, slot: Any) -> TrainState:
    """Return the state with a transform's slot; None leaves it without one."""
    return attrs.evolve(state, slots=_with(dict(state.slots), name, slot))


def _with(slots: dict[str, Any], name: str, slot: Any) -> dict[str, Any]:
    if slot is None and name not in slots:
        return slots
    return {**slots, name: slot}


def _shared_seed(state: TrainState, purpose: str) -> int:
    """Return the key of a stream that is the same on all ranks."""
    definition = state.definition
    return streams.fold(streams.key(state.seed, definition.name, purpose), state.step)


def finalize(state: TrainState) -> TrainState:
    """Return the state with what its transforms owe at the end, as a last average.

    The given state is donated.
    """
    state.lease.check()
    owners = state.definition.setup.having("finalize")
    if not owners:
        return state
    after = attrs.evolve(state, lease=Lease())
    state.lease.end(_interrupted(state))
    with torch.no_grad():
        for each in owners:
            after, slot = each.finalize(after, after.slots.get(each.name))
            after = with_own_slot(after, each.name, slot)
    state.lease.end(_donated(state))
    return after


def build(state: TrainState) -> TrainState:
    """Build the engine now, so that what it refuses is said before the first step.

    Raises:
        ReplicaMismatchError: the ranks hold different models.
    """
    state.lease.check()
    with own_modes(state.definition.world.device):
        engine_of(state).bind(state)
    return state


def release(state: TrainState) -> None:
    """Drop the engine of the state and its kin early; the next step makes a new one."""
    state.definition.cache.clear()
