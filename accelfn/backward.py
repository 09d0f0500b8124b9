# SPDX-License-Identifier: Apache-2.0
"""`value_and_grad`: a loss as a function of a state, differentiated; nothing changes."""

from typing import Any, Protocol

from accelfn.data import Batch
from accelfn.engine.engine import engine_of
from accelfn.engine.read_loss import Samples
from accelfn.engine.runner import LossFunction
from accelfn.errors import ArgumentError, BatchError, GradsError
from accelfn.grads import Grads
from accelfn.loss import Metrics
from accelfn.modes import own_modes
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
            check_update(state, into)
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
    if (
        start is None
        or start == state.cursor
        or (into is not None and start == into.cursor)
    ):
        return
    msg = (
        f"This batch begins at epoch {start.epoch} sample {start.samples}, but the"
        f" state stands at epoch {state.cursor.epoch} sample {state.cursor.samples}."
        " Start af.batches(state) again from this state."
    )
    raise BatchError(msg)


def check_update(state: TrainState, grads: Grads) -> None:
    """Raise unless these gradients are of this state's update, and not given away.

    Raises:
        GradsError: they are not.
    """
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
