# SPDX-License-Identifier: Apache-2.0
"""Lower the learning rates when a reported value stops improving."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeAlias

import attrs
import torch

from accelfn.base.arguments import integer, number, one_of, option
from accelfn.definition.transform import transform
from accelfn.errors import ArgumentError
from accelfn.model.optimizer import Hyper
from accelfn.state.state import TrainState
from accelfn.state.update import Update

Slot: TypeAlias = dict[str, Any]


_is_factor = number(lambda size: 0 <= size < 1, "a factor of at least 0 and below 1")
_is_size = number(lambda size: 0 <= size < math.inf, "a finite number, 0 or more")


def _are_rates(owner: object, field: Any, value: Any) -> None:
    for rate in value if isinstance(value, tuple) else [value]:
        _is_size(owner, field, rate)


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


@transform
class reduce_lr_on_plateau:
    """Multiply the learning rates by `factor` when a reported value stops improving.

    It does what torch's ReduceLROnPlateau does. Report the result of each evaluation with
    `state = af.report_metric(state, value)`. When the value has stopped improving, the
    transform reduces the learning rates that the schedule (or the optimizer) sets, so a
    warm-up still works. The best value and all counts are saved with the state.

    Acts on: init, hyper.

    Args:
        factor: multiplies the learning rates at each reduction; 0.1.
        mode: "min" if lower values are better, "max" if higher values are better.
        patience: how many values in a row may be no better than the best one; the next such
        value causes a reduction.
        threshold: a value is better only if it improves on the best value by more than this.
        threshold_mode: "rel" if `threshold` is a fraction of the best value, "abs" if it is a
        difference.
        cooldown: the number of values after a reduction that do not count as bad.
        min_lr: the lower bound of the learning rates; a list has one bound per parameter group.
        eps: a reduction that changes a learning rate by this or less is not applied.

    Law:
        The learning rates are bitwise equal to those of torch's ReduceLROnPlateau for the same
        values. Nothing changes before the first reduction.

    Cost:
        One multiplication per parameter group, update and earlier reduction.

    Raises:
        ArgumentError: when applied to a state, `min_lr` is a list, and its length is not the
        number of parameter groups.

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
        """Create a slot without reported values."""
        groups = state.definition.optimizer.param_groups
        if isinstance(self.min_lr, Sequence) and len(self.min_lr) != len(groups):
            msg = (
                f"{self!r}: min_lr has {len(self.min_lr)} values, but the optimizer has"
                f" {len(groups)} parameter groups. Pass one number, or one number per group."
            )
            raise ArgumentError(msg)
        worst = math.inf if self.mode == "min" else -math.inf
        counts = {"num_bad": 0, "cooling": 0, "num_reductions": 0}
        return {"best": worst, **counts, "reported": ()}

    def _take_value(self, slot: Slot, value: float) -> Slot:
        """Return the slot after one value, counted as torch's ReduceLROnPlateau.step does."""
        slot = {**slot, "num_bad": slot["num_bad"] + 1, "reported": ()}
        if self._is_better(value, slot["best"]):
            slot |= {"best": value, "num_bad": 0}
        if slot["cooling"] > 0:
            slot |= {"cooling": slot["cooling"] - 1, "num_bad": 0}
        if slot["num_bad"] > self.patience:
            slot |= {"cooling": self.cooldown, "num_bad": 0}
            slot["num_reductions"] += 1
        return slot

    def hyper(self, hyper: Hyper, slot: Slot, update: Update) -> tuple[Hyper, Slot]:
        """Count the values that were reported, and return the reduced learning rates if any."""
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
        size = self.threshold if self.mode == "min" else -self.threshold
        bar = best * (1.0 - size) if self.threshold_mode == "rel" else best - size
        return value < bar if self.mode == "min" else value > bar

    def _reduce_rate(self, rate: Any, floor: float, times: int) -> float:
        """Return a learning rate after `times` reductions.

        If the rate is a tensor, the result of each reduction is rounded to its dtype.
        """
        now = float(rate)
        for _ in range(times):
            lower = max(now * self.factor, floor)
            if not now - lower > self.eps:  # later reductions are not larger
                break
            is_tensor = isinstance(rate, torch.Tensor)
            now = torch.tensor(lower, dtype=rate.dtype).item() if is_tensor else lower
        return now
