# SPDX-License-Identifier: Apache-2.0
"""Pure functions from the update number to the factor of all learning rates."""

import math
from typing import Any, cast

import attrs

from accelfn.base.arguments import integer, is_number
from accelfn.base.calling import called
from accelfn.errors import ArgumentError
from accelfn.schedules.of_torch import from_torch
from accelfn.schedules.schedule import Schedule


def _updates(least: int) -> Any:
    check = integer(least, "a number of updates", within="schedules.")
    return attrs.field(validator=check)


def _is_factor(owner: object, field: Any, value: Any) -> None:
    if not is_number(value) or not math.isfinite(value) or value < 0:
        msg = (
            f"schedules.{type(owner).__name__}({field.name}={value!r}): expected a"
            " finite factor, 0 or more."
        )
        raise ArgumentError(msg)


def _factor(default: float | None = None) -> Any:
    if default is None:
        return attrs.field(validator=_is_factor)
    return attrs.field(default=default, validator=_is_factor)


@called
@attrs.frozen
class constant:
    """Keep the learning rate at `factor` times the optimizer's own."""

    factor: float = _factor(1.0)

    def __call__(self, step: int, /) -> float:
        """Return the factor, whatever the update."""
        return self.factor


@called
@attrs.frozen
class linear:
    """Go from `start` to `end` over `num_updates`, then stay at `end`.

    `linear(n)` is Transformers' `get_scheduler("linear", ...)` without a warm-up.
    """

    num_updates: int = _updates(1)
    start: float = attrs.field(default=1.0, validator=_is_factor, kw_only=True)
    end: float = attrs.field(default=0.0, validator=_is_factor, kw_only=True)

    def __call__(self, step: int, /) -> float:
        """Return the factor of update `step`."""
        done = min(step / self.num_updates, 1.0)
        return self.start + (self.end - self.start) * done


@called
@attrs.frozen
class warmup_cosine:
    """Rise linearly over `num_warmup` updates, then fall as a half cosine to `end`.

    Update i of the warm-up has factor `(i + 1) / (num_warmup + 1)`, so that none is spent at
    0; update `num_warmup` has factor 1, and from `num_updates` on it is `end`.

    References:
        Loshchilov and Hutter 2017, "SGDR: Stochastic Gradient Descent with Warm Restarts".
    """

    num_warmup: int = _updates(0)
    num_updates: int = _updates(1)
    end: float = attrs.field(default=0.0, validator=_is_factor, kw_only=True)

    def __attrs_post_init__(self) -> None:
        """Refuse a warm-up that leaves no update to fall in."""
        if self.num_warmup >= self.num_updates:
            msg = (
                f"schedules.warmup_cosine(num_warmup={self.num_warmup},"
                f" num_updates={self.num_updates}): the warm-up must be shorter than"
                " the whole."
            )
            raise ArgumentError(msg)

    def __call__(self, step: int, /) -> float:
        """Return the factor of update `step`."""
        if step < self.num_warmup:
            return (step + 1) / (self.num_warmup + 1)
        done = min((step - self.num_warmup) / (self.num_updates - self.num_warmup), 1.0)
        return self.end + (1.0 - self.end) * 0.5 * (1.0 + math.cos(math.pi * done))


@called
@attrs.frozen
class one_cycle:
    """Rise from `start` to 1 over a fraction of the updates, then fall to `end`, by cosines.

    The optimizer's learning rate is the peak. Past `num_updates` it stays at `end`.

    References:
        Smith and Topin 2018, "Super-Convergence".
    """

    num_updates: int = _updates(2)
    peak_at: float = attrs.field(default=0.3, kw_only=True)
    start: float = attrs.field(default=1 / 25, validator=_is_factor, kw_only=True)
    end: float = attrs.field(default=1 / 250_000, validator=_is_factor, kw_only=True)

    def __attrs_post_init__(self) -> None:
        """Refuse a peak outside the cycle."""
        if not 0 < self.peak_at < 1:
            msg = (
                f"schedules.one_cycle(peak_at={self.peak_at!r}): expected a fraction"
                " between 0 and 1."
            )
            raise ArgumentError(msg)

    def __call__(self, step: int, /) -> float:
        """Return the factor of update `step`."""
        last = self.num_updates - 1
        peak = self.peak_at * last
        if step <= peak:
            return _cosine(self.start, 1.0, step / peak)
        return _cosine(1.0, self.end, min((step - peak) / (last - peak), 1.0))


def _cosine(start: float, end: float, done: float) -> float:
    return end + (start - end) * 0.5 * (1.0 + math.cos(math.pi * done))


@called
@attrs.frozen(init=False)
class join:
    """Run schedules one after the other; each starts again from update 0.

    Example:
        >>> warm_then_fall = join((100, linear(100, start=0.0, end=1.0)), linear(900))
        >>> warm_then_fall(50), warm_then_fall(100), warm_then_fall(1000)
        (0.5, 1.0, 0.0)
    """

    parts: tuple[tuple[int, Schedule], ...]
    last: Schedule

    def __init__(self, *parts: "tuple[int, Schedule] | Schedule") -> None:
        """Take `(num_updates, schedule)` pairs, and a schedule for all the rest."""
        *pairs, last = parts or (None,)
        whole = [part[-1] if _is_part(part) else part for part in cast("Any", parts)]
        if any(isinstance(each, from_torch) for each in whole):
            msg = (
                "schedules.join: from_torch gives learning rates, not factors of them. Join"
                " torch's schedulers inside its factory, by"
                " torch.optim.lr_scheduler.SequentialLR."
            )
            raise ArgumentError(msg)
        for pair in pairs:
            if not _is_part(pair):
                msg = (
                    "schedules.join: expected (num_updates, schedule) before the last,"
                    f" got {pair!r}."
                )
                raise ArgumentError(msg)
        if not callable(last):
            msg = (
                "schedules.join: the last argument is the schedule of all the rest, got"
                f" {last!r}."
            )
            raise ArgumentError(msg)
        self.__attrs_init__(parts=tuple(pairs), last=last)  # type: ignore[attr-defined]

    def __call__(self, step: int, /) -> float:
        """Return the factor of update `step`."""
        for num_updates, schedule in self.parts:
            if step < num_updates:
                return schedule(step)
            step -= num_updates
        return self.last(step)


def _is_part(part: Any) -> bool:
    if not isinstance(part, tuple) or len(cast("tuple[Any, ...]", part)) != 2:
        return False
    count, schedule = cast("tuple[Any, Any]", part)
    return isinstance(count, int) and count >= 1 and callable(schedule)
