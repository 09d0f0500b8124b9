# SPDX-License-Identifier: Apache-2.0
"""Lower the learning rates when a reported value stops improving."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeAlias

import attrs
import torch

from accelfn.base.arguments import integer, is_number, one_of, option, satisfies
from accelfn.definition.transform import transform
from accelfn.errors import ArgumentError
from accelfn.model.optimizer import Hyper
from accelfn.state.state import TrainState
from accelfn.state.update import Update

Slot: TypeAlias = dict[str, Any]


_is_factor = satisfies(
    lambda value: is_number(value) and 0 <= value < 1,
    "a factor of at least 0 and below 1",
)
_is_size = satisfies(
    lambda value: is_number(value) and 0 <= value < math.inf,
    "a finite number, 0 or more",
)


def _are_rates(owner: object, field: Any, value: Any) -> None:
    for rate in value if isinstance(value, tuple) else [value]:
        _is_size(owner, field, rate)


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


@transform
class reduce_lr_on_plateau:
    """Multiply the learning rates by `factor` when a reported value stops improving.

    torch's ReduceLROnPlateau as a transform: pass it an evaluation's result by `state =
    af.report_metric(state, value)`. Its rates are the rates of the schedule, or of the optimizer,
    reduced once per stall; a warm-up continues below it. Its memory is in the slot and is saved
    with the state.

    Acts on: init, hyper.

    Args:
        factor: the factor of each reduction; 0.1.
        mode: "min" if lower values are better, "max" if higher values are.
        patience: the number of values in a row that may be no better before a reduction.
        threshold: the improvement over the best value that counts.
        threshold_mode: "rel", a part of the best, or "abs", a difference.
        cooldown: the number of values after a reduction that do not count as bad.
        min_lr: the lower bound of the rates; a list has one bound per parameter group.
        eps: the smallest reduction that is applied.

    Law:
        The rates are bitwise those of ReduceLROnPlateau on the same values. Before the first
        reduction nothing changes.

    Cost:
        One multiplication per group, update and reduction.

    Raises:
        ArgumentError: when applied to a state with another number of parameter groups than
        `min_lr` has rates.

    Example:
        >>> reduce_lr_on_plateau(0.5, patience=3)
        af.reduce_lr_on_plateau(0.5, patience=3)
    """

    tells: ClassVar[Mapping[str, Any]] = {"draws_nothing": True}
    factor: float = attrs.field(default=0.1, validator=_is_factor)
    mode: Literal["min", "max"] = option("min", one_of("min", "max"))
    patience: int = option(10, integer(0, "a number of reported values"))
    threshold: float = option(1e-4, _is_size)
    threshold_mode: Literal["rel", "abs"] = option("rel", one_of("rel", "abs"))
    cooldown: int = option(0, integer(0, "a number of reported values"))
    min_lr: float | Sequence[float] = option(0.0, _are_rates, converter=_frozen)
    eps: float = option(1e-8, _is_size)

    def init(self, state: TrainState) -> Slot:
        """Begin without values."""
        groups = state.definition.optimizer.param_groups
        if isinstance(self.min_lr, Sequence) and len(self.min_lr) != len(groups):
            msg = (
                f"{self!r}: expected one min_lr, or one for each of the {len(groups)}"
                f" parameter groups, got {len(self.min_lr)}."
            )
            raise ArgumentError(msg)
        worst = math.inf if self.mode == "min" else -math.inf
        counts = {"num_bad": 0, "cooling": 0, "num_reductions": 0}
        return {"best": worst, **counts, "reported": ()}

    def _take_value(self, slot: Slot, value: float) -> Slot:
        """Return the slot after a value, as torch's ReduceLROnPlateau.step counts."""
        best, num_bad, cooling = slot["best"], slot["num_bad"] + 1, slot["cooling"]
        num_reductions = slot["num_reductions"]
        if self._is_better(value, best):
            best, num_bad = value, 0
        if cooling > 0:
            cooling, num_bad = cooling - 1, 0
        if num_bad > self.patience:
            num_reductions, cooling, num_bad = num_reductions + 1, self.cooldown, 0
        return {
            "best": best,
            "num_bad": num_bad,
            "cooling": cooling,
            "num_reductions": num_reductions,
            "reported": (),
        }

    def hyper(self, hyper: Hyper, slot: Slot, update: Update) -> tuple[Hyper, Slot]:
        """Take the reported values; set the reduced rates after the first reduction."""
        for value in slot["reported"]:
            slot = self._take_value(slot, value)
        if not slot["num_reductions"]:
            return {}, slot
        least = self.min_lr
        rates: dict[str | tuple[int | str, str], float] = {}
        for i, group in enumerate(update.state.definition.optimizer.param_groups):
            floor = least[i] if isinstance(least, Sequence) else least
            rate = hyper.get((i, "lr"), group["lr"])
            rates[i, "lr"] = self._reduce_rate(rate, floor, slot["num_reductions"])
        return rates, slot

    def _is_better(self, value: float, best: float) -> bool:
        size = self.threshold
        if self.mode == "min":
            bar = best * (1.0 - size) if self.threshold_mode == "rel" else best - size
            return value < bar
        bar = best * (size + 1.0) if self.threshold_mode == "rel" else best + size
        return value > bar

    def _reduce_rate(self, rate: Any, floor: float, times: int) -> float:
        """Return a rate after `times` reductions, each rounded to a tensor rate's dtype."""
        now = float(rate)
        for _ in range(times):
            lower = max(now * self.factor, floor)
            if not now - lower > self.eps:  # nor will the next one be larger
                break
            is_tensor = isinstance(rate, torch.Tensor)
            now = torch.tensor(lower, dtype=rate.dtype).item() if is_tensor else lower
        return now
