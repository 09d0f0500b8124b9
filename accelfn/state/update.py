# SPDX-License-Identifier: Apache-2.0
"""`Update`: what a step makes once, and hands down to all that have a say in it."""

import math
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch.autograd import profiler

from accelfn.base import draws
from accelfn.base.arguments import is_number
from accelfn.base.devices import host_memory
from accelfn.base.draws import NOTHING, span
from accelfn.base.tree import have_shards
from accelfn.definition.layout import WholeDraws
from accelfn.definition.transform import pair
from accelfn.errors import ArgumentError, OptimizerError
from accelfn.model.optimizer import STRUCTURE, Assignments, Hyper
from accelfn.schedules.factors import advise_of_end
from accelfn.state.grads import GradInfo, Grads
from accelfn.state.metrics import Number
from accelfn.world import World

if TYPE_CHECKING:
    from accelfn.state.state import TrainState

# What transforms draw: the same numbers on all ranks, a function of the state.
#
# For what is split over the ranks, each draws its part of what one rank would draw.


def shared_draws(
    state: "TrainState", field: str, purpose: str | None = None
) -> AbstractContextManager[object]:
    """Return a context in which draws are the same on all ranks.

    Whatever calls a transform's field with a state calls it in one, of the field's name or
    another purpose. Transforms that draw nothing say so: seeding for nobody would cost 5 µs.
    """
    if field not in state.definition.setup.drawing:
        return NOTHING
    return draws_for(state, purpose or field)


def draws_for(state: "TrainState", purpose: str) -> AbstractContextManager[object]:
    """Return a context in which draws are a function of the state and a purpose, on any rank."""
    definition = state.definition
    keys, name = definition.cache.keys, definition.name
    known = keys.get(purpose)
    if known is None or known[0] != state.seed:
        known = keys[purpose] = (state.seed, draws.key(state.seed, name, purpose))
    key = draws.fold(known[1], state.num_tried)
    seeded = draws.seeded(key, definition.world.device)
    return seeded if definition.layout is None else _of_wholes(seeded)


@contextmanager
def _of_wholes(seeded: draws.seeded) -> Generator[None]:
    with seeded, WholeDraws():
        yield


_NONE = Grads(tensors={}, taken=GradInfo(divisor=0))


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
        slots = set_slot(self.slots, name, slot)
        return Update(
            state=self.state, slots=slots, grads=self.grads, skipped=self.skipped
        )


def apply_readonly(
    field: str, value: Any, update: Update, kind: type | tuple[type, ...]
) -> Any:
    """Return what becomes of a value, where no slot may change.

    Raises:
        ArgumentError: a transform returned another slot; or something else than the value.
    """
    value, after = apply_transforms(field, value, update, kind)
    for name, slot in after.slots.items():
        if update.slots.get(name) is not slot:
            msg = (
                f"{field} of the transform {name!r} returned another slot, which nothing"
                " would keep: it is asked as often as somebody looks. Return the slot that"
                " was given; after_update may change it."
            )
            raise ArgumentError(msg)
    return value


def set_slot(slots: Mapping[str, Any], name: str, slot: Any) -> Mapping[str, Any]:
    """Return slots of which one is another; None leaves a transform without one."""
    if slot is None and name not in slots:
        return slots
    return {**slots, name: slot}


def apply_transforms(
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


# How many updates were skipped, where a device has decided it and nobody has asked yet.


LOOK_EVERY = 100
"""Updates after which a device is asked for what it counts, where nobody else asks."""


@attrs.define(eq=False)
class Skips:
    """A count on a device, under way to the host; whoever reads it waits for it alone.

    Attributes:
        tried: how many updates there were, skipped or not.
        count: how many of them were skipped, a scalar on the device.
    """

    tried: int
    count: torch.Tensor
    _host: torch.Tensor
    _arrived: torch.Event | None
    _known: int | None = None

    @classmethod
    def sent(cls, tried: int, count: torch.Tensor) -> "Skips":
        """Return a count that is on its way from now on."""
        if count.is_cpu:
            return cls(tried, count, count, None)
        host = host_memory(count.shape, count.dtype, count.device)
        host.copy_(count, non_blocking=True)
        arrived = torch.Event(count.device)
        arrived.record()
        return cls(tried, count, host, arrived)

    def read(self) -> int:
        """Return the count; work that was given to the device since is not waited for."""
        if self._known is None:
            if self._arrived is not None:
                self._arrived.synchronize()
            self._known = int(self._host)
        return self._known


# The hyperparameters of an update: the optimizer's own, the schedule's, then `hyper`'s.


def plan_hyper(update: Update) -> tuple[Assignments, Update]:
    """Return what the schedule and the transforms set for the update that is taken now.

    Raises:
        OptimizerError: a parameter group or a hyperparameter is not there.
    """
    definition = update.state.definition
    if definition.rates is None and not definition.setup.owners["hyper"]:
        return {}, update
    planned, is_over, update = _plan(update)
    if is_over:
        _notice_end(update.state)
    return planned, update


def _plan(update: Update) -> tuple[Assignments, bool, Update]:
    """Return what is set, the last one having the say; and whether the schedule is over.

    Where transforms set rates, nobody can tell.
    """
    state = update.state
    definition = state.definition
    planned = {} if definition.rates is None else definition.rates(state.step)
    is_over, named = _is_over(planned), set[str]()
    owners = definition.setup.owners["hyper"]
    if not owners:
        return planned, is_over, update
    groups = definition.optimizer.param_groups
    try:
        with shared_draws(state, "hyper"), torch.no_grad():
            for owner in owners:
                definition.cache.planned = planned
                slot = update.slots.get(owner.name)
                returned = owner.hyper(MappingProxyType(planned), slot, update)
                found, kept = pair(owner, "hyper", returned, Mapping)
                planned = override_hyper(groups, planned, found)
                named.update(w if isinstance(w, str) else w[-1] for w in found)
                if kept is not slot:
                    update = update.with_slot(owner.name, kept)
    finally:
        definition.cache.planned = None
    return planned, is_over and "lr" not in named, update


def _is_over(planned: Assignments) -> bool:
    rate = planned.get((0, "lr"))
    # a rate that is a tensor may be on a device, which nobody waits for
    return type(rate) is float and rate == 0.0


def _notice_end(state: "TrainState") -> None:
    """Warn of a schedule that is over, and no transform sets a rate."""
    definition = state.definition
    if definition.rates is not None and definition.world.is_main:
        cache = definition.cache
        cache.looks_at = advise_of_end(definition.rates, state.step, cache.looks_at)


def next_hyper(state: "TrainState", slots: Mapping[str, Any]) -> Assignments:
    """Return all that is set for a state's next update; the rest is the optimizer's own.

    In a transform's `hyper`, what is set so far.
    """
    planned = state.definition.cache.planned
    return _plan(Update(state=state, slots=slots))[0] if planned is None else planned


def next_rates(state: "TrainState", slots: Mapping[str, Any]) -> tuple[float, ...]:
    """Return the learning rate of each parameter group in a state's next update."""
    now, groups = next_hyper(state, slots), state.definition.optimizer.param_groups
    return tuple(float(now.get((i, "lr"), g["lr"])) for i, g in enumerate(groups))


def override_hyper(
    groups: Sequence[Mapping[str, Any]], planned: Assignments, hyper: Hyper
) -> Assignments:
    """Return what an update sets in parameter groups, with `hyper` laid over it.

    Args:
        groups: of the optimizer, with its own values.
        planned: by (group, name).
        hyper: by name, of all groups, or by (group, name).

    Raises:
        OptimizerError: a parameter group or a hyperparameter is not there.
    """
    planned = dict(planned)
    for where, value in hyper.items():
        for i in _chosen(groups, where):
            key = where if isinstance(where, str) else where[1]
            if key not in groups[i] or key in STRUCTURE:
                known = sorted(groups[i].keys() - STRUCTURE)
                msg = f"hyper {key!r}: parameter group {i} has {known}."
                raise OptimizerError(msg)
            _check_number(key, value, groups[i][key])
            planned[i, key] = value
    return planned


def _chosen(
    groups: Sequence[Mapping[str, Any]], where: str | tuple[int | str, str]
) -> Iterable[int]:
    if isinstance(where, str):
        return range(len(groups))
    wanted = where[0] if isinstance(where, tuple) and len(where) == 2 else None
    if isinstance(wanted, int) and 0 <= wanted < len(groups):
        return [wanted]
    found = [i for i, group in enumerate(groups) if group.get("name") == wanted]
    if wanted is None or not found:
        known = [group.get("name", i) for i, group in enumerate(groups)]
        msg = (
            f"hyper {where!r}: expected a hyperparameter's name, or (group, name) with"
            f" one of the parameter groups {known}."
        )
        raise OptimizerError(msg)
    return found


def _check_number(key: str, value: object, base: object) -> None:
    """Refuse what would be in place of a number, and none that an update can use."""
    if not is_number(base) or isinstance(value, torch.Tensor):
        return
    if not is_number(value) or not math.isfinite(value):
        msg = f"hyper {key!r}: a transform gave {value!r}; expected a finite number."
        raise OptimizerError(msg)
