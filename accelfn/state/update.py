# SPDX-License-Identifier: Apache-2.0
"""`Update`: the record of the current update, which a step passes to all transforms."""

import math
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import attrs
import torch
from torch.autograd import profiler

from accelfn.base import draws
from accelfn.base.arguments import is_number
from accelfn.base.devices import host_memory
from accelfn.base.draws import NOTHING, span
from accelfn.base.tree import is_shard
from accelfn.definition.transform import ARGUMENTS, WRAPPERS
from accelfn.errors import ArgumentError, OptimizerError
from accelfn.model.optimizer import STRUCTURE, Assignments, Hyper
from accelfn.schedules.factors import advise_of_end
from accelfn.state.results import GradInfo, Grads, Number
from accelfn.world import World

if TYPE_CHECKING:
    from accelfn.state.state import TrainState

# Random numbers of transforms: equal on all ranks, and dependent only on the state.
#
# For a sharded tensor, each rank gets its shard of the random numbers for the full tensor.


def shared_draws(
    state: "TrainState", field: str, purpose: str | None = None
) -> AbstractContextManager[object]:
    """Return a context for a transform's method, with equal random numbers on all ranks.

    The random numbers depend on the state, and on the method's name or another purpose. If no
    transform with this method uses random numbers, the context does nothing, because seeding
    takes 5 µs.
    """
    if field not in state.definition.setup.drawing:
        return NOTHING
    return draws_for(state, purpose or field)


def draws_for(state: "TrainState", purpose: str) -> AbstractContextManager[object]:
    """Return a context that makes random numbers depend only on the state and a purpose."""
    definition = state.definition
    keys, name = definition.cache.keys, definition.name
    entry = keys.get(purpose)
    if entry is None or entry[0] != state.seed:
        entry = keys[purpose] = (state.seed, draws.key(state.seed, name, purpose))
    key = draws.fold(entry[1], state.num_tried)
    context = draws.seeded(key, definition.world.device)
    return context if definition.layout is None else _of_wholes(context)


@contextmanager
def _of_wholes(context: draws.seeded) -> Generator[None]:
    from accelfn.definition.layout import WholeDraws  # noqa: PLC0415 - a slow import

    with context, WholeDraws():
        yield


Kind: TypeAlias = type | tuple[type, ...]
"""The second argument of `isinstance`."""
_NONE = Grads({}, taken=GradInfo(divisor=0, update=0), reduced=True)


@attrs.frozen(kw_only=True, eq=False)
class Update:
    """A read-only record of the current update: the third argument of a transform's methods.

    Each stage of a step creates a new record. Before the backward pass (in `loss` and
    `value_and_grad`) and outside of a step (in `eval_params` and `finalize`) the record has no
    gradients.

    Attributes:
        state: the state before the update. In `after_update` you can read its numbers, such as
            `state.step`, but not its tensors, because they belong to the next state.
        slots: the slots of all transforms at this stage. A method may change only the slot of
            its transform.
        grads: the gradients at this stage; without gradients an empty `Grads` of weight 0.
        skipped: whether the update is skipped.
    """

    state: "TrainState"
    slots: Mapping[str, Any]
    grads: Grads = _NONE
    skipped: bool = False

    @property
    def world(self) -> World:
        """The world of the state: all ranks that make this update."""
        return self.state.definition.world

    @property
    def num_tried(self) -> int:
        """The number of updates before this update, including skipped updates."""
        return self.state.num_tried

    @property
    def weight(self) -> Number:
        """The weight of the gradients: of this rank, or of all ranks after the reduction."""
        return self.grads.weight

    @property
    def replicated(self) -> bool:
        """Whether every rank has the same gradients: they are reduced, and not sharded."""
        grads, trains_apart = self.grads, self.state.definition.trains_apart
        return grads.reduced and not (
            trains_apart or any(map(is_shard, grads.as_taken.values()))
        )

    def with_grads(self, grads: Grads) -> "Update":
        """Return a copy of the update with other gradients."""
        return Update(
            state=self.state, slots=self.slots, grads=grads, skipped=self.skipped
        )

    def with_slot(self, name: str, slot: Any) -> "Update":
        """Return a copy of the update with one slot set; a new slot that is None is not added."""
        slots = set_slot(self.slots, name, slot)
        return Update(
            state=self.state, slots=slots, grads=self.grads, skipped=self.skipped
        )


def apply_readonly(field: str, value: Any, update: Update, kind: Kind) -> Any:
    """Apply a method of all transforms to a value; the method must not change slots.

    Raises:
        ArgumentError: a transform returned a new slot, or a value of another type.
    """
    value, after = apply_transforms(field, value, update, kind)
    if after is not update:
        before = update.slots
        name = next(n for n, slot in after.slots.items() if before.get(n) is not slot)
        msg = (
            f"{field} of the transform {name!r} returned a new slot, which would be lost:"
            " accelfn may call this method any number of times. Return the argument `slot`"
            " itself, and change the slot in after_update."
        )
        raise ArgumentError(msg)
    return value


def set_slot(slots: Mapping[str, Any], name: str, slot: Any) -> Mapping[str, Any]:
    """Return a copy of `slots` with one slot set; a new slot that is None is not added."""
    if slot is None and name not in slots:
        return slots
    return {**slots, name: slot}


def split_result(owner: object, field: str, result: Any, kind: Kind) -> tuple[Any, Any]:
    """Check the result of a transform's method, and return it: a pair of value and slot.

    Raises:
        ArgumentError: the result is not such a pair; the message names the transform.
    """
    kinds = type(result).__name__
    if isinstance(result, tuple) and len(cast("tuple[Any, ...]", result)) == 2:
        value, slot = cast("tuple[Any, Any]", result)
        if isinstance(value, kind):
            return value, slot
        kinds = f"({type(value).__name__}, {type(slot).__name__})"
    first = ARGUMENTS[field][0]
    msg = f"{owner!r}.{field} returned {kinds}; expected the pair ({first}, slot)."
    raise ArgumentError(msg)


def apply_transforms(
    field: str, value: Any, update: Update, kind: Kind
) -> tuple[Any, Update]:
    """Apply a method of all transforms to a value, from left to right.

    The methods `loss` and `value_and_grad` wrap a function. They are applied from right to
    left, so that the wrapper of the leftmost transform is outermost.

    Raises:
        ArgumentError: a transform did not return a pair of a value of this type and a slot.
    """
    state = update.state
    owners = state.definition.setup.owners[field]
    if not owners:
        return value, update
    wraps = field in WRAPPERS
    owners = owners[::-1] if wraps else owners
    is_profiling = profiler._is_profiler_enabled  # pyright: ignore[reportPrivateUsage]
    is_drawing = field in state.definition.setup.drawing
    draws_of_field = draws_for(state, field) if is_drawing else NOTHING
    with draws_of_field, NOTHING if wraps else torch.no_grad():
        for owner in owners:
            slot = update.slots.get(owner.name)
            with span("accelfn", field, owner.name) if is_profiling else NOTHING:
                result = getattr(owner, field)(value, slot, update)
            value, new_slot = split_result(owner, field, result, kind)
            if new_slot is not slot:
                update = update.with_slot(owner.name, new_slot)
    return value, update


# The number of skipped updates, counted on the device, so that the CPU need not wait.


LOOK_EVERY = 100
"""The number of updates between two reads of the count on the device."""


@attrs.define(eq=False)
class Skips:
    """The number of skipped updates on a device, and its asynchronous copy to the CPU.

    Attributes:
        tried: the number of updates, skipped or not.
        count: the number of skipped updates, a scalar on the device.
    """

    tried: int
    count: torch.Tensor
    _host: torch.Tensor
    _arrived: torch.Event | None
    _known: int | None = None

    @classmethod
    def start_copy(cls, num_tried: int, count: torch.Tensor) -> "Skips":
        """Start the copy of a count to the CPU."""
        if count.is_cpu:
            return cls(num_tried, count, count, None)
        host = host_memory(count.shape, count.dtype, count.device)
        host.copy_(count, non_blocking=True)
        event = torch.Event(count.device)
        event.record()
        return cls(num_tried, count, host, event)

    def read(self) -> int:
        """Return the count: wait for its copy, but not for later work on the device."""
        if self._known is None:
            if self._arrived is not None:
                self._arrived.synchronize()
            self._known = int(self._host)
        return self._known


# Hyperparameters of an update. The schedule replaces the optimizer's values, and the methods
# `hyper` of transforms replace the schedule's values.


def plan_hyper(update: Update) -> tuple[Assignments, Update]:
    """Return the hyperparameters that the schedule and transforms set for this update.

    Raises:
        OptimizerError: a parameter group or a hyperparameter does not exist.
    """
    definition = update.state.definition
    if definition.rates is None and not definition.setup.owners["hyper"]:
        return {}, update
    assignments, is_over, update = _plan(update)
    if is_over and definition.rates is not None and definition.world.is_main:
        cache, step = definition.cache, update.state.step
        cache.looks_at = advise_of_end(definition.rates, step, cache.looks_at)
    return assignments, update


def _plan(update: Update) -> tuple[Assignments, bool, Update]:
    """Return the hyperparameters, and whether the schedule has ended with learning rate 0.

    A later setting replaces an earlier setting. If a transform sets learning rates, the schedule
    does not count as ended.
    """
    state = update.state
    definition = state.definition
    assignments = {} if definition.rates is None else definition.rates(state.step)
    rate, named = assignments.get((0, "lr")), set[str]()
    # does not read a tensor, because reading from a device would wait
    is_over = type(rate) is float and rate == 0.0
    owners = definition.setup.owners["hyper"]
    if not owners:
        return assignments, is_over, update
    groups = definition.optimizer.param_groups
    rates = {(i, "lr"): group["lr"] for i, group in enumerate(groups) if "lr" in group}
    try:
        with shared_draws(state, "hyper"), torch.no_grad():
            for owner in owners:
                definition.cache.planned = assignments
                slot = update.slots.get(owner.name)
                so_far = MappingProxyType({**rates, **assignments})
                result = owner.hyper(so_far, slot, update)
                hyper, new_slot = split_result(owner, "hyper", result, Mapping)
                assignments = override_hyper(groups, assignments, hyper)
                named.update(w if isinstance(w, str) else w[-1] for w in hyper)
                if new_slot is not slot:
                    update = update.with_slot(owner.name, new_slot)
    finally:
        definition.cache.planned = None
    return assignments, is_over and "lr" not in named, update


def next_hyper(state: "TrainState", slots: Mapping[str, Any]) -> Assignments:
    """Return the hyperparameters that schedule and transforms set for the next update.

    Inside a transform's `hyper`, return only the hyperparameters that were set so far.
    """
    so_far = state.definition.cache.planned
    return _plan(Update(state=state, slots=slots))[0] if so_far is None else so_far


def next_rates(state: "TrainState", slots: Mapping[str, Any]) -> tuple[float, ...]:
    """Return the learning rate of each parameter group for a state's next update."""
    now, groups = next_hyper(state, slots), state.definition.optimizer.param_groups
    return tuple(float(now.get((i, "lr"), g["lr"])) for i, g in enumerate(groups))


def override_hyper(
    groups: Sequence[Mapping[str, Any]], assignments: Assignments, hyper: Hyper
) -> Assignments:
    """Return the hyperparameters by (group, name), with the values of `hyper` added.

    Args:
        groups: the optimizer's parameter groups, with the optimizer's values.
        assignments: the hyperparameters so far, by (group, name).
        hyper: new values, by name for all groups, or by (group, name).

    Raises:
        OptimizerError: a parameter group or a hyperparameter does not exist.
    """
    assignments = dict(assignments)
    for where, value in hyper.items():
        for i in _chosen(groups, where):
            key = where if isinstance(where, str) else where[1]
            if key not in groups[i] or key in STRUCTURE:
                names = sorted(groups[i].keys() - STRUCTURE)
                msg = (
                    f"The method hyper of a transform set {key!r}, but parameter group {i} of the"
                    f" optimizer has only {', '.join(names)}."
                )
                raise OptimizerError(msg)
            _check_number(key, value, groups[i][key])
            assignments[i, key] = value
    return assignments


def _chosen(
    groups: Sequence[Mapping[str, Any]], where: str | tuple[int | str, str]
) -> Iterable[int]:
    if isinstance(where, str):
        return range(len(groups))
    name_or_index = where[0] if isinstance(where, tuple) and len(where) == 2 else None
    if isinstance(name_or_index, int) and 0 <= name_or_index < len(groups):
        return [name_or_index]
    matching = [i for i, g in enumerate(groups) if g.get("name") == name_or_index]
    if name_or_index is None or not matching:
        names = [group.get("name", i) for i, group in enumerate(groups)]
        msg = (
            f"The method hyper of a transform returned the key {where!r}; expected the name of a"
            f" hyperparameter, or (group, name) with one of the parameter groups {names}."
        )
        raise OptimizerError(msg)
    return matching


def _check_number(key: str, value: object, base: object) -> None:
    """Raise unless the value of a numeric hyperparameter is a finite number."""
    if not is_number(base) or isinstance(value, torch.Tensor):
        return
    if not is_number(value) or not math.isfinite(value):
        msg = f"A transform's hyper returned {value!r} for {key!r}; expected a finite number."
        raise OptimizerError(msg)
