# SPDX-License-Identifier: Apache-2.0
"""What a schedule makes of an optimizer's parameter groups, update by update."""

import math
from typing import Any, Protocol

from torch.optim import Optimizer

from accelfn.errors import ArgumentError, OptimizerError
from accelfn.schedules.of_torch import from_torch
from accelfn.schedules.schedule import Schedule
from accelfn.structure.prototype import STRUCTURE, Assignments


class Rates(Protocol):
    """A schedule that is bound to parameter groups; a pure function of the update."""

    def __call__(self, update: int, /) -> Assignments:
        """Return the hyperparameters of an update that the schedule sets."""
        ...


def bound(schedule: Schedule | None, optimizer: Optimizer) -> Rates | None:
    """Return a schedule bound to an optimizer's groups; of none, None.

    Raises:
        ArgumentError: the optimizer has no rate, or a torch scheduler does not go with it.
    """
    if schedule is None:
        return None
    if isinstance(schedule, from_torch):
        return schedule.on(optimizer)
    return FactorRates(schedule, optimizer)


class FactorRates:
    """The optimizer's own rates, times a factor."""

    def __init__(self, factor: Schedule, optimizer: Optimizer) -> None:
        """Take the function, and the rates."""
        _check_pure(factor)
        self._factor = factor
        self._rates: list[tuple[tuple[int, str], Any]] = []
        for i, group in enumerate(optimizer.param_groups):
            if "lr" not in group:
                known = sorted(group.keys() - STRUCTURE)
                msg = (
                    f"schedule: the optimizer's parameter group {i} has no 'lr', only"
                    f" {known}. Leave the schedule out, or set what it has by a"
                    " transform's hyper."
                )
                raise OptimizerError(msg)
            self._rates.append(((i, "lr"), group["lr"]))

    def __call__(self, update: int) -> Assignments:
        """Return the rates of an update.

        Raises:
            ArgumentError: the function gives no factor.
        """
        factor = self._factor(update)
        is_number = isinstance(factor, (int, float)) and math.isfinite(factor)
        if not is_number or factor < 0:
            msg = (
                f"The schedule gave {factor!r} for update {update}; expected a finite"
                " number, 0 or more, the factor of the learning rate."
            )
            raise ArgumentError(msg)
        return {at: rate * factor for at, rate in self._rates}


def _check_pure(factor: Schedule) -> None:
    """Refuse a function that counts its calls, or draws: a run could not be resumed.

    Raises:
        ArgumentError: it gives two factors for one update.
    """
    try:
        first, _, again = (factor(update) for update in (0, 1, 0))
    except Exception:  # noqa: BLE001 - it is the step's to tell
        return
    numbers = isinstance(first, (int, float)) and isinstance(again, (int, float))
    if numbers and repr(first) != repr(again):
        msg = (
            f"The schedule gave {first!r} for update 0, and {again!r} when it was asked again;"
            " expected a function of the update number alone, that counts no calls and draws"
            " nothing. What goes by losses is af.plateau, or a transform's hyper."
        )
        raise ArgumentError(msg)
