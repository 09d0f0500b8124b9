# SPDX-License-Identifier: Apache-2.0
"""Lower the learning rates when what an evaluation gives is better no longer."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeAlias

import attrs
import torch

from accelfn.base.arguments import integer, is_number
from accelfn.definition.transform import transform
from accelfn.errors import ArgumentError
from accelfn.model.optimizer import Hyper
from accelfn.state.state import TrainState
from accelfn.state.update import Update

Slot: TypeAlias = dict[str, Any]


def _is_factor(_owner: object, _field: object, value: Any) -> None:
    if not is_number(value) or not 0 <= value < 1:
        msg = f"af.plateau({value!r}): expected a factor of at least 0 and below 1."
        raise ArgumentError(msg)


def _is_size(_owner: object, field: Any, value: Any) -> None:
    if not is_number(value) or not 0 <= value < math.inf:
        msg = (
            f"af.plateau({field.name}={value!r}): expected a finite number, 0 or more."
        )
        raise ArgumentError(msg)


def _are_rates(owner: object, field: Any, value: Any) -> None:
    for rate in value if isinstance(value, tuple) else [value]:
        _is_size(owner, field, rate)


def _one_of(*words: str) -> Any:
    def check(_owner: object, field: Any, value: Any) -> None:
        if value not in words:
            known = " or ".join(map(repr, words))
            msg = f"af.plateau({field.name}={value!r}): expected {known}."
            raise ArgumentError(msg)

    return check


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


@transform
class plateau:
    """Multiply the learning rates by `factor` when an observed value stops improving.

    torch's ReduceLROnPlateau as a transform: give it what an evaluation measures by
    `state = af.observe(state, value)`. Its rates are those of the schedule, or of the
    optimizer, reduced as often as it stalled; so a warm-up goes on below it. What it has
    seen is in the slot, saved with the state.

    Acts on: init, hyper, observe.

    Args:
        factor: by what rates are multiplied; 0.1.
        mode: "min" where a lower value is better, "max" where a higher one is.
        patience: how many observed values that are no better in a row are let pass.
        threshold: how much better than the best a value must be to count.
        threshold_mode: "rel", a part of the best, or "abs", a difference.
        cooldown: how many observed values after a reduction do not count as bad.
        min_lr: below which no rate is reduced; a list has one for each parameter group.
        eps: reductions that are no larger are left out.

    Law:
        Bitwise the rates of ReduceLROnPlateau on the same values; before the first
        reduction it changes nothing.

    Cost:
        A multiplication a group, update and reduction. Values observed cost nothing else.

    Raises:
        ArgumentError: when applied to a state whose parameter groups are not as many as
            the rates of `min_lr`.

    Example:
        >>> plateau(0.5, patience=3)
        af.plateau(0.5, patience=3)
    """

    tells: ClassVar[Mapping[str, Any]] = {"draws_nothing": True}
    factor: float = attrs.field(default=0.1, validator=_is_factor)
    mode: Literal["min", "max"] = attrs.field(
        default="min", validator=_one_of("min", "max")
    )
    patience: int = attrs.field(
        default=10, validator=integer(0, "a number of observed values")
    )
    threshold: float = attrs.field(default=1e-4, validator=_is_size)
    threshold_mode: Literal["rel", "abs"] = attrs.field(
        default="rel", validator=_one_of("rel", "abs")
    )
    cooldown: int = attrs.field(
        default=0, validator=integer(0, "a number of observed values")
    )
    min_lr: float | Sequence[float] = attrs.field(
        default=0.0, validator=_are_rates, converter=_frozen
    )
    eps: float = attrs.field(default=1e-8, validator=_is_size)

    def init(self, state: TrainState) -> Slot:
        """Begin with nothing observed."""
        self._check_number_of_rates(state)
        worst = math.inf if self.mode == "min" else -math.inf
        return {"best": worst, "num_bad": 0, "cooling": 0, "num_reductions": 0}

    def observe(self, value: float, slot: Slot, update: Update) -> tuple[float, Slot]:
        """Let the slot know a value too; torch's ReduceLROnPlateau.step."""
        best, num_bad, cooling = slot["best"], slot["num_bad"] + 1, slot["cooling"]
        num_reductions = slot["num_reductions"]
        if self._is_better(value, best):
            best, num_bad = value, 0
        if cooling > 0:
            cooling, num_bad = cooling - 1, 0
        if num_bad > self.patience:
            num_reductions, cooling, num_bad = num_reductions + 1, self.cooldown, 0
        return value, {
            "best": best,
            "num_bad": num_bad,
            "cooling": cooling,
            "num_reductions": num_reductions,
        }

    def hyper(self, hyper: Hyper, slot: Slot, update: Update) -> tuple[Hyper, Slot]:
        """Set the reduced rates, once there are any."""
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
        """Return a rate after some reductions; of a tensor's, each is rounded as that is."""
        now = float(rate)
        for _ in range(times):
            lower = max(now * self.factor, floor)
            if not now - lower > self.eps:  # nor is it for another time
                break
            held = isinstance(rate, torch.Tensor)
            now = torch.tensor(lower, dtype=rate.dtype).item() if held else lower
        return now

    def _check_number_of_rates(self, state: TrainState) -> None:
        """Refuse a number of least rates that is not the groups'."""
        groups = state.definition.optimizer.param_groups
        if isinstance(self.min_lr, Sequence) and len(self.min_lr) != len(groups):
            msg = (
                f"{self!r}: expected one min_lr, or one for each of the {len(groups)}"
                f" parameter groups, got {len(self.min_lr)}."
            )
            raise ArgumentError(msg)
