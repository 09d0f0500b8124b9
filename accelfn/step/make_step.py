# SPDX-License-Identifier: Apache-2.0
"""The step: gradients of a loss, then an update; the product of two public functions.

`make_step(loss_fn)` is `value_and_grad(loss_fn)` followed by `apply_grads`, nothing else,
so SAM, a GAN or distillation are a few lines of a user's own code.
"""

from typing import Any, Protocol

from accelfn.base.calling import called
from accelfn.base.contexts import own_modes
from accelfn.engine.building import engine_of
from accelfn.engine.runner import LossFunction
from accelfn.state.argument import check_state
from accelfn.state.metrics import Metrics
from accelfn.state.state import TrainState
from accelfn.step.counts import Count
from accelfn.step.holding import holding
from accelfn.step.stages import take, take_in_backward
from accelfn.step.value_and_grad import check_update, gradients_of


class Step(Protocol):
    """What `make_step` returns."""

    def __call__(
        self, state: TrainState, batch: Any, /, *extras: Any, donate: bool = True
    ) -> tuple[TrainState, Metrics]:
        """Take one update; the given state is donated unless told otherwise."""
        ...


@called
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


@called
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


@called
def release(state: TrainState) -> None:
    """Drop the engine of the state and its kin early; the next step makes a new one."""
    check_state("af.release(state)", state)
    state.definition.cache.clear()
