# SPDX-License-Identifier: Apache-2.0
"""The hyperparameters of an update: the optimizer's own, the schedule's, then `hyper`'s."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from accelfn.base.arguments import is_number
from accelfn.definition.fields import check_returned
from accelfn.errors import OptimizerError
from accelfn.schedules.advice import advise_of_end
from accelfn.state.moment import Moment
from accelfn.state.shared_draws import shared_draws
from accelfn.structure.prototype import STRUCTURE, Assignments, Hyper


def hyper_of(state: Moment, slots: Mapping[str, Any]) -> Hyper:
    """Return what the transforms set for a state's next update; the last one has the say."""
    hyper: dict[Any, Any] = {}
    owners = state.definition.setup.having("hyper")
    if not owners:
        return hyper
    with shared_draws(state, "hyper", owners):
        for each in owners:
            found = each.hyper(state, slots.get(each.name))
            ok = isinstance(found, Mapping)
            expected = 'hyperparameters by name, {"lr": ...}'
            check_returned(each, "hyper", ok=ok, returned=found, expected=expected)
            # what is set again is set last, under whichever of its names
            hyper = {k: v for k, v in hyper.items() if k not in found} | {**found}
    return hyper


def planned_for(state: Moment, slots: Mapping[str, Any]) -> tuple[Assignments, Hyper]:
    """Return what the schedule and the transforms set for the update that is taken now."""
    planned, hyper = scheduled(state), hyper_of(state, slots)
    rate = planned.get((0, "lr"))
    # a rate that is a tensor may be on a device, which nobody waits for
    if type(rate) is float and rate == 0.0:
        _notice_end(state, hyper)
    return planned, hyper


def _notice_end(state: Moment, hyper: Hyper) -> None:
    """Warn of a schedule that is over, unless transforms set rates."""
    definition = state.definition
    sets = {where if isinstance(where, str) else where[-1] for where in hyper}
    if definition.rates is not None and definition.world.rank == 0 and "lr" not in sets:
        cache = definition.cache
        cache.looks_at = advise_of_end(definition.rates, state.step, cache.looks_at)


def scheduled(state: Moment) -> Assignments:
    """Return what the schedule sets for a state's next update."""
    rates = state.definition.rates
    return {} if rates is None else rates(state.step)


def of_next_update(state: Moment, slots: Mapping[str, Any]) -> Assignments:
    """Return all that is set for a state's next update; the rest is the optimizer's own."""
    groups = state.definition.optimizer.param_groups
    return assigned(groups, scheduled(state), hyper_of(state, slots))


def rates_of_next_update(state: Moment, slots: Mapping[str, Any]) -> tuple[float, ...]:
    """Return the learning rate of each parameter group in a state's next update."""
    now, groups = of_next_update(state, slots), state.definition.optimizer.param_groups
    return tuple(float(now.get((i, "lr"), g["lr"])) for i, g in enumerate(groups))


def assigned(
    groups: Sequence[Mapping[str, Any]], planned: Assignments, hyper: Hyper
) -> Assignments:
    """Return what an update sets in parameter groups: the schedule's, and `hyper` over it.

    Args:
        groups: of the optimizer, with its own values.
        planned: what a schedule sets; it is added to.
        hyper: by name, of all groups, or by (group, name).

    Raises:
        OptimizerError: a parameter group or a hyperparameter is not there.
    """
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
