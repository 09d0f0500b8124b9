# SPDX-License-Identifier: Apache-2.0
"""The hyperparameters of an update: the optimizer's own, the schedule's, then `hyper`'s."""

import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from accelfn.base.arguments import is_number
from accelfn.definition.fields import pair
from accelfn.errors import OptimizerError
from accelfn.schedules.advice import advise_of_end
from accelfn.state.shared_draws import shared_draws
from accelfn.state.update import Update
from accelfn.structure.prototype import STRUCTURE, Assignments, Hyper

if TYPE_CHECKING:
    from accelfn.state.state import TrainState


def planned_for(update: Update) -> tuple[Assignments, Update]:
    """Return what the schedule and the transforms set for the update that is taken now.

    Raises:
        OptimizerError: a parameter group or a hyperparameter is not there.
    """
    definition = update.state.definition
    if definition.rates is None and not definition.setup.owners["hyper"]:
        return {}, update
    planned, is_over, update = _planned(update)
    if is_over:
        _notice_end(update.state)
    return planned, update


def _planned(update: Update) -> tuple[Assignments, bool, Update]:
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
                planned = laid_over(groups, planned, found)
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


def of_next_update(state: "TrainState", slots: Mapping[str, Any]) -> Assignments:
    """Return all that is set for a state's next update; the rest is the optimizer's own.

    In a transform's `hyper`, what is set so far.
    """
    planned = state.definition.cache.planned
    return _planned(Update(state=state, slots=slots))[0] if planned is None else planned


def rates_of_next_update(
    state: "TrainState", slots: Mapping[str, Any]
) -> tuple[float, ...]:
    """Return the learning rate of each parameter group in a state's next update."""
    now, groups = of_next_update(state, slots), state.definition.optimizer.param_groups
    return tuple(float(now.get((i, "lr"), g["lr"])) for i, g in enumerate(groups))


def laid_over(
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
