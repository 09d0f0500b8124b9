# SPDX-License-Identifier: Apache-2.0
"""The state after another: made by the step, which can do without a look at the call."""

import inspect
from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch.autograd import profiler

from accelfn.base.contexts import NOTHING, span
from accelfn.definition.facts import facts_of
from accelfn.definition.fields import pair
from accelfn.errors import ArgumentError
from accelfn.state.lease import Lease
from accelfn.state.shared_draws import shared_draws
from accelfn.state.skips import Skips
from accelfn.state.state import TrainState
from accelfn.state.update import Update, with_own
from accelfn.state.values import OptState

_fill: Callable[..., None] = inspect.unwrap(TrainState.__init__)
"""Set a new state's fields."""
_FIELDS = tuple((each.name, each.alias) for each in attrs.fields(TrainState))


def successor(
    update: Update,
    state: TrainState,
    opt_state: OptState,
    flag: torch.Tensor | None,
    params: Any = None,
) -> TrainState:
    """Return the state after an update that the optimizer has taken, unless a flag says no.

    It has the tensors of the state before it, or the given parameters, and a lease of its own.
    """
    cursor, num_skipped = update.grads.taken.cursor, state._num_skipped  # pyright: ignore[reportPrivateUsage]
    step = state._step  # pyright: ignore[reportPrivateUsage]
    if flag is not None or isinstance(step, Skips):
        step, num_skipped = _counted(state, flag), 0
    else:
        step += 1
    after = object.__new__(TrainState)
    _fill(
        after,
        params=state._params if params is None else params,  # pyright: ignore[reportPrivateUsage]
        buffers=state._buffers,  # pyright: ignore[reportPrivateUsage]
        opt_state=opt_state,
        step=step,
        cursor=state.cursor if cursor is None else cursor,
        seed=state.seed,
        num_skipped=num_skipped,
        slots=update.slots,
        definition=state.definition,
        lease=Lease(),
    )
    return after


def skipped(update: Update, state: TrainState) -> TrainState:
    """Return the state after an update that is left out: the same, after the batch."""
    cursor = update.grads.taken.cursor
    return changed(
        state,
        cursor=state.cursor if cursor is None else cursor,
        step=state.step,
        num_skipped=state.num_skipped + 1,
        lease=Lease(),
    )


def changed(state: TrainState, **fields: Any) -> TrainState:
    """Return the state with other fields, as `attrs.evolve` does."""
    made = object.__new__(TrainState)
    for name, alias in _FIELDS:
        if alias not in fields:
            fields[alias] = getattr(state, name)
    _fill(made, **fields)
    return made


def through_state(field: str, state: TrainState, update: Update) -> TrainState:
    """Let a state flow through the transforms that have a say in it, with their slots.

    After an update that was skipped, only those are asked that see skips.
    """
    owners = update.state.definition.setup.owners[field]
    if update.skipped:
        owners = [each for each in owners if "sees_skips" in facts_of(each)]
    if not owners:
        return state
    profiled = profiler._is_profiler_enabled  # pyright: ignore[reportPrivateUsage]
    with shared_draws(state, field), torch.no_grad():
        for owner in owners:
            slot = update.slots.get(owner.name)
            with span("accelfn", field, owner.name) if profiled else NOTHING:
                returned = getattr(owner, field)(state, slot, update)
            after, kept = pair(owner, field, returned, TrainState)
            if update.skipped and after is not state:
                msg = (
                    f"{owner!r}.{field} returned another state after a skipped update, which"
                    " leaves all as it is. Return the state that was given."
                )
                raise ArgumentError(msg)
            state = after
            slots = state._slots  # pyright: ignore[reportPrivateUsage] - as they are shown, in less time
            if kept is not slots.get(owner.name):
                state = changed(state, slots=with_own(slots, owner.name, kept))
    return state


def _counted(state: TrainState, flag: torch.Tensor | None) -> Skips:
    """Return how many updates were skipped, after one of which a device knows."""
    skips = state.skips
    before = state.num_skipped if skips is None else skips.count
    count = before if flag is None else before + flag.long()
    return Skips.sent(state.num_tried + 1, torch.as_tensor(count))
