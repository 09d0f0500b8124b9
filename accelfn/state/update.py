# SPDX-License-Identifier: Apache-2.0
"""`Update`: what a step makes once, and hands down to all that have a say in it."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch.autograd import profiler

from accelfn.base.contexts import NOTHING, span
from accelfn.base.shards import have_shards
from accelfn.definition.fields import pair
from accelfn.errors import ArgumentError
from accelfn.state.grads import Grads, Taken
from accelfn.state.metrics import Number
from accelfn.state.shared_draws import shared_draws
from accelfn.world import World

if TYPE_CHECKING:
    from accelfn.state.state import TrainState

_NONE = Grads(tensors={}, taken=Taken(divisor=0))


@attrs.frozen(kw_only=True, eq=False)
class Update:
    """One update on its way, to be read: the third argument of a transform's methods.

    Each stage of a step makes the next of it. Outside of a step, where `eval_params`,
    `observe` and `finalize` are called, it is that of nothing tried, without gradients.

    Attributes:
        state: before the update. In `after_update` its numbers can be read, but no tensors:
            by then these are the next state's.
        slots: of all transforms, as they are at this stage; a method changes its own alone.
        grads: as they are at this stage; outside of a step there are none, of no weight.
        skipped: whether the update is left out.
    """

    state: "TrainState"
    slots: Mapping[str, Any]
    grads: Grads = _NONE
    skipped: bool = False

    @property
    def world(self) -> World:
        """The ranks that take it."""
        return self.state.definition.world

    @property
    def num_tried(self) -> int:
        """How many updates were tried before it, those too that were skipped."""
        return self.state.num_tried

    @property
    def weight(self) -> Number:
        """What the gradients' losses weigh: of all ranks, once they are reduced."""
        return self.grads.weight

    @property
    def replicated(self) -> bool:
        """Whether each rank has all gradients, the same on all: reduced, and no parts."""
        grads, apart = self.grads, self.state.definition.trains_apart
        return grads.reduced and not (apart or have_shards(grads.as_taken.values()))

    def with_grads(self, grads: Grads) -> "Update":
        """Return the update with other gradients."""
        return Update(
            state=self.state, slots=self.slots, grads=grads, skipped=self.skipped
        )

    def with_slot(self, name: str, slot: Any) -> "Update":
        """Return the update in which a transform has another slot; None leaves it without."""
        slots = with_own(self.slots, name, slot)
        return Update(
            state=self.state, slots=slots, grads=self.grads, skipped=self.skipped
        )


def looked(
    field: str, value: Any, update: Update, kind: type | tuple[type, ...]
) -> Any:
    """Return what becomes of a value, where no slot may change.

    Raises:
        ArgumentError: a transform returned another slot; or something else than the value.
    """
    value, after = through(field, value, update, kind)
    for name, slot in after.slots.items():
        if update.slots.get(name) is not slot:
            msg = (
                f"{field} of the transform {name!r} returned another slot, which nothing"
                " would keep: it is asked as often as somebody looks. Return the slot that"
                " was given; after_update may change it."
            )
            raise ArgumentError(msg)
    return value


def with_own(slots: Mapping[str, Any], name: str, slot: Any) -> Mapping[str, Any]:
    """Return slots of which one is another; None leaves a transform without one."""
    if slot is None and name not in slots:
        return slots
    return {**slots, name: slot}


def through(
    field: str, value: Any, update: Update, kind: type | tuple[type, ...]
) -> tuple[Any, Update]:
    """Let a value flow through the transforms that have a say in it, left to right.

    Raises:
        ArgumentError: one returned something else than a value of a kind, and a slot.
    """
    state = update.state
    profiled = profiler._is_profiler_enabled  # pyright: ignore[reportPrivateUsage]
    with shared_draws(state, field), torch.no_grad():
        for owner in state.definition.setup.owners[field]:
            slot = update.slots.get(owner.name)
            with span("accelfn", field, owner.name) if profiled else NOTHING:
                returned = getattr(owner, field)(value, slot, update)
            value, kept = pair(owner, field, returned, kind)
            if kept is not slot:
                update = update.with_slot(owner.name, kept)
    return value, update
