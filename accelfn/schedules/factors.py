# SPDX-License-Identifier: Apache-2.0
"""Learning-rate schedules: pure functions of the update number, and torch schedulers."""

import math
from array import array
from collections.abc import Callable, Iterator
from functools import partial
from threading import Lock
from typing import Any, NoReturn, Protocol, TypeAlias, cast

import attrs
import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from accelfn.base.arguments import (
    advise,
    explain_call_errors,
    integer,
    is_integer,
    is_number,
    qualname,
    signature,
)
from accelfn.errors import ArgumentError, OptimizerError
from accelfn.model.optimizer import STRUCTURE, Assignments, scratch_of

# `from_torch`: torch's learning-rate schedulers as pure functions of the update number.


_PLATEAU = (
    "A schedule can depend only on the update number, not on a metric. Put"
    " af.reduce_lr_on_plateau(...) into the setup instead, and report the metric with"
    " state = af.report_metric(state, value)."
)

_BY_COUNT = (
    "It is not a torch LRScheduler; the schedulers of timm are not. Use a schedule of accelfn,"
    " such as af.schedules.warmup_cosine(num_warmup, num_updates). Or let the factory return an"
    " LRScheduler with a get_lr that calls step_update(self.last_epoch) of the given scheduler"
    " and returns the lr of all groups."
)


def _is_factory(_owner: object, _field: object, factory: Any) -> None:
    """Reject an invalid factory at once, before a state is created."""
    if not callable(factory):
        needs = "a function that takes an optimizer and returns a scheduler"
        example = "functools.partial(torch.optim.lr_scheduler.StepLR, step_size=10)"
        msg = f"af.schedules.from_torch({factory!r}): expected {needs}, such as {example}."
        raise ArgumentError(msg)
    while isinstance(factory, partial):
        factory = cast("Any", factory).func
    if isinstance(factory, type) and issubclass(factory, ReduceLROnPlateau):
        msg = f"af.schedules.from_torch({factory.__name__}): {_PLATEAU}"
        raise ArgumentError(msg)


@attrs.frozen
class from_torch:
    """Use the learning rates of a torch scheduler, and the momentum if the scheduler changes it.

    For each new state, accelfn creates the scheduler on a separate optimizer with the state's
    parameter groups and options. It steps the scheduler in advance, and stores the values of each
    update. So a checkpoint needs no scheduler state, several states can share a `from_torch`, and
    you can read the values of any update.

    The values are learning rates, and other options that the scheduler sets in the parameter
    groups (OneCycleLR and CyclicLR set the momentum, or the first of the betas). They are not
    factors, so `join` does not accept `from_torch`. To combine torch schedulers, use SequentialLR
    in the factory.

    Args:
        factory: a function that takes a torch optimizer and returns a scheduler for it: for
            example `partial(OneCycleLR, max_lr=0.1, total_steps=500)`, or a function of
            Transformers.

    Law:
        The values are bitwise equal to those of the scheduler on a real optimizer, stepped after
        each update, and so are the parameters. This holds for every scheduler of torch and
        Transformers that steps without a metric.

    Cost:
        One scheduler step per update, some microseconds. Memory: 8 bytes per update and
        parameter group for the learning rate, and 100 bytes for a momentum.

    Raises:
        ArgumentError: the factory is not callable. When a state is created: the factory fails on
            the state's groups, does not return an LRScheduler for its argument, or the scheduler
            reads a metric (like ReduceLROnPlateau; use `af.reduce_lr_on_plateau`) or the
            optimizer's state. In an update: the scheduler has no learning rate for the update.

    Example:
        >>> from functools import partial
        >>> from torch.optim.lr_scheduler import StepLR
        >>> halve = from_torch(partial(StepLR, step_size=10, gamma=0.5))
    """

    factory: Callable[[Optimizer], LRScheduler] = attrs.field(validator=_is_factory)

    def __call__(self, step: int, /) -> NoReturn:
        """Raise an error, because the learning rates need an optimizer's parameter groups.

        Raises:
            ArgumentError: always.
        """
        msg = (
            f"af.schedules.from_torch(...)({step!r}): you cannot call it, because it has learning"
            " rates for an optimizer's groups instead of one factor. Pass it to"
            " TrainState.create(schedule=...), and read state.lrs. To combine schedulers, use"
            " torch.optim.lr_scheduler.SequentialLR or LambdaLR in the factory."
        )
        raise ArgumentError(msg)

    def on(self, optimizer: Optimizer) -> "TorchRates":
        """Return the scheduler's values for an optimizer's groups. The optimizer is unchanged."""
        return TorchRates(self.factory, optimizer)


class TorchRates:
    """The values that a torch scheduler sets in an optimizer's parameter groups, by update.

    The values are computed once, in order, by one thread at a time. If the scheduler fails, each
    later call raises the same error. After an interrupt, the scheduler is created again.
    """

    def __init__(
        self, factory: Callable[[Optimizer], LRScheduler], optimizer: Optimizer
    ) -> None:
        """Create the scheduler on a copy of the optimizer. The copy never trains."""
        self._lock = Lock()
        self._factory, self._prototype = factory, optimizer
        self._optimizer: Any = scratch_of(optimizer)
        groups = self._optimizer.param_groups
        self._options = [
            {k: _plain_option(v) for k, v in group.items() if k not in STRUCTURE}
            for group in groups
        ]
        self._scheduler = self._make_scheduler()
        self._is_whole = True
        self._ended: Exception | None = None
        self._series: dict[tuple[int, str], Any] = {
            (i, "lr"): array("d") for i in range(len(groups))
        }
        self._num_known = 0
        self._record()

    def __call__(self, update: int) -> Assignments:
        """Return the values of the parameter groups in an update.

        Raises:
            ArgumentError: the scheduler has no values for this update.
        """
        if update >= self._num_known:
            with self._lock:
                while update >= self._num_known:
                    self._advance()
        return {at: series[update] for at, series in self._series.items()}

    def _make_scheduler(self) -> Any:
        """Call the factory with the copy of the optimizer, and return its scheduler."""
        try:
            scheduler: Any = self._factory(self._optimizer)
        except Exception as error:
            kind, num_groups = type(self._prototype).__name__, len(self._options)
            call = f"the factory failed for {kind} (parameter groups: {num_groups})"
            msg = f"af.schedules.from_torch: {call}: {type(error).__name__}: {error}"
            raise ArgumentError(msg) from error
        _check(scheduler, self._optimizer)
        # otherwise torch warns that the scheduler steps before the optimizer
        self._optimizer._opt_called = True
        return scheduler

    def _advance(self) -> None:
        """Step the scheduler, and store its values."""
        if self._ended is None:
            try:
                if not self._is_whole:
                    self._make_again()
                # until the end: an interrupt may leave a half-done step
                self._is_whole = False
                self._scheduler.step()
                self._record()
                self._is_whole = True
            except Exception as error:  # noqa: BLE001 - raised below, and in later calls
                self._ended = error
        if self._ended is not None:
            kind = type(self._scheduler).__name__
            reason = f"has no learning rate for update {self._num_known}: {self._ended}"
            msg = f"af.schedules.from_torch: {kind} {reason}"
            raise ArgumentError(msg) from self._ended

    def _make_again(self) -> None:
        """Replace an interrupted scheduler with a new scheduler at the same update."""
        for series in self._series.values():
            del series[self._num_known :]
        self._optimizer = scratch_of(self._prototype)
        self._scheduler = self._make_scheduler()
        for _ in range(self._num_known - 1):
            self._scheduler.step()

    def _record(self) -> None:
        """Store the values of an update. An option is stored from its first change on."""
        groups = self._optimizer.param_groups
        for i, group in enumerate(groups):
            for key, before in self._options[i].items():
                is_new = (i, key) not in self._series
                if is_new and _differs(_plain_option(group[key]), before):
                    self._series[i, key] = [before] * self._num_known
        for (i, key), series in self._series.items():
            series.append(_plain_option(groups[i][key]))
        self._num_known += 1


def _plain_option(value: Any) -> Any:
    """Convert a one-element tensor to a number. Return other options unchanged."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else value
    return value


def _differs(now: object, before: object) -> bool:
    return now != before if is_number(now) else now is not before


def _check(scheduler: Any, optimizer: Optimizer) -> None:
    """Reject a result that is not a scheduler of this optimizer, or needs arguments to step."""
    kind = type(scheduler).__name__
    step = getattr(scheduler, "step", None)
    params = signature(step).parameters.values() if callable(step) else ()
    names = [
        param.name
        for param in params
        if param.default is param.empty
        and param.kind in (param.POSITIONAL_ONLY, param.POSITIONAL_OR_KEYWORD)
    ]
    why = ""
    if names:
        follows_metric = names[0] != "epoch" or "plateau" in kind.lower()
        advice = _PLATEAU if follows_metric else _BY_COUNT
        why = f"with a step method that needs {', '.join(names)}. {advice}"
    elif not isinstance(scheduler, LRScheduler):
        why = "but it must return a torch LRScheduler."
    elif scheduler.optimizer is not optimizer:
        advice = "Use the argument: lambda optimizer: StepLR(optimizer, 10)"
        why = f"but for another optimizer than its argument, so rates would never change. {advice}."
    if why:
        msg = f"af.schedules.from_torch: the factory returned {kind}, {why}"
        raise ArgumentError(msg)


# Schedules that return a factor, as pure functions of the update number.


class Schedule(Protocol):
    """A schedule: a pure function from the update number to a factor of the learning rate."""

    def __call__(self, step: int, /) -> float:
        """Return the factor for update `step`. The first update is 0."""
        ...


def _updates(least: int) -> Any:
    check = integer(least, "a number of updates", within="af.schedules.")
    return attrs.field(validator=check)


def _is_factor(owner: object, field: Any, value: Any) -> None:
    if not is_number(value) or not math.isfinite(value) or value < 0:
        call = f"af.schedules.{type(owner).__name__}({field.name}={value!r})"
        msg = f"{call}: expected a finite factor, 0 or more."
        raise ArgumentError(msg)


@attrs.frozen
class constant:
    """Keep the learning rate at `factor` times the learning rate of the optimizer."""

    factor: float = attrs.field(default=1.0, validator=_is_factor)

    def __call__(self, step: int, /) -> float:
        """Return the same factor for any update."""
        return self.factor


@explain_call_errors
@attrs.frozen
class linear:
    """Change the factor linearly from `start` to `end` over `num_updates`, then keep `end`.

    `linear(n)` equals Transformers' `get_scheduler("linear", ...)` without a warm-up.
    """

    num_updates: int = _updates(1)
    start: float = attrs.field(default=1.0, validator=_is_factor, kw_only=True)
    end: float = attrs.field(default=0.0, validator=_is_factor, kw_only=True)

    def __call__(self, step: int, /) -> float:
        """Return the factor of update `step`."""
        fraction = min(step / self.num_updates, 1.0)
        return self.start + (self.end - self.start) * fraction


@explain_call_errors
@attrs.frozen
class warmup_cosine:
    """Increase the factor linearly over `num_warmup` updates, then decay it by a cosine to `end`.

    Update i of the warm-up has the factor `(i + 1) / (num_warmup + 1)`, so no update has the
    factor 0. Update `num_warmup` has the factor 1. From update `num_updates` on, the factor is
    `end`.

    References:
        Loshchilov and Hutter 2017, "SGDR: Stochastic Gradient Descent with Warm Restarts".
    """

    num_warmup: int = _updates(0)
    num_updates: int = _updates(1)
    end: float = attrs.field(default=0.0, validator=_is_factor, kw_only=True)

    def __attrs_post_init__(self) -> None:
        """Reject a warm-up that leaves no update for the decay."""
        if self.num_warmup >= self.num_updates:
            counts = f"num_warmup={self.num_warmup}, num_updates={self.num_updates}"
            reason = "the warm-up must be shorter than the whole schedule"
            msg = f"af.schedules.warmup_cosine({counts}): {reason}."
            raise ArgumentError(msg)

    def __call__(self, step: int, /) -> float:
        """Return the factor of update `step`."""
        if step < self.num_warmup:
            return (step + 1) / (self.num_warmup + 1)
        length = self.num_updates - self.num_warmup
        return _cosine(1.0, self.end, min((step - self.num_warmup) / length, 1.0))


@attrs.frozen
class one_cycle:
    """Increase the factor from `start` to 1, then decrease it to `end`, both along a cosine.

    The factor is 1 after the fraction `peak_at` of the updates, so the optimizer's learning rate
    is the peak. After `num_updates`, the factor stays at `end`.

    References:
        Smith and Topin 2018, "Super-Convergence".
    """

    num_updates: int = _updates(2)
    peak_at: float = attrs.field(default=0.3, kw_only=True)
    start: float = attrs.field(default=1 / 25, validator=_is_factor, kw_only=True)
    end: float = attrs.field(default=1 / 250_000, validator=_is_factor, kw_only=True)

    def __attrs_post_init__(self) -> None:
        """Reject a `peak_at` that is not between 0 and 1."""
        if not 0 < self.peak_at < 1:
            call = f"af.schedules.one_cycle(peak_at={self.peak_at!r})"
            msg = f"{call}: expected a fraction between 0 and 1."
            raise ArgumentError(msg)

    def __call__(self, step: int, /) -> float:
        """Return the factor of update `step`."""
        last = self.num_updates - 1
        peak = self.peak_at * last
        if step <= peak:
            return _cosine(self.start, 1.0, step / peak)
        return _cosine(1.0, self.end, min((step - peak) / (last - peak), 1.0))


def _cosine(start: float, end: float, fraction: float) -> float:
    return end + (start - end) * 0.5 * (1.0 + math.cos(math.pi * fraction))


@attrs.frozen(init=False)
class join:
    """Run several schedules one after the other. Each schedule counts updates from 0.

    Example:
        >>> warm_then_fall = join((100, linear(100, start=0.0, end=1.0)), linear(900))
        >>> warm_then_fall(50), warm_then_fall(100), warm_then_fall(1000)
        (0.5, 1.0, 0.0)
    """

    parts: tuple[tuple[int, Schedule], ...]
    last: Schedule

    def __init__(self, *parts: "tuple[int, Schedule] | Schedule") -> None:
        """Initialize with pairs `(num_updates, schedule)`, and a schedule for all later updates."""
        *pairs, last = parts or (None,)
        schedules = [p[-1] if _is_part(p) else p for p in cast("Any", parts)]
        if any(isinstance(schedule, from_torch) for schedule in schedules):
            advice = (
                "Join schedulers in its factory: torch.optim.lr_scheduler.SequentialLR"
            )
            msg = f"af.schedules.join joins factors, but from_torch has learning rates. {advice}."
            raise ArgumentError(msg)
        if not all(map(_is_part, pairs)) or not callable(last):
            needs = "(num_updates, schedule) pairs, and then a schedule for all later updates"
            msg = f"af.schedules.join{parts!r}: expected {needs}."
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
    return is_integer(count, 1) and callable(schedule)


# Schedules combined with the learning rates of an optimizer's parameter groups.


Rates: TypeAlias = Callable[[int], Assignments]
"""A schedule for an optimizer's parameter groups: it returns the hyperparameters that it sets in
an update, and depends only on the number of the update."""


def bind_rates(schedule: Schedule | None, optimizer: Optimizer) -> Rates | None:
    """Return a schedule as `Rates` for an optimizer's groups, or None without a schedule.

    Raises:
        ArgumentError: the optimizer has no learning rate, or a torch scheduler does not fit.
    """
    if schedule is None:
        return None
    if isinstance(schedule, from_torch):
        return schedule.on(optimizer)
    return FactorRates(schedule, optimizer)


class FactorRates:
    """A schedule's `Rates`: the optimizer's learning rates, multiplied by the schedule's factor."""

    def __init__(self, factor: Schedule, optimizer: Optimizer) -> None:
        """Initialize with the schedule, and the learning rates of the optimizer's groups."""
        _check_pure(factor)
        self._factor = factor
        self._rates: list[tuple[tuple[int, str], Any]] = []
        for i, group in enumerate(optimizer.param_groups):
            if "lr" not in group:
                options = sorted(group.keys() - STRUCTURE)
                names = ", ".join(map(repr, options)) or "params"
                reason = f"schedules set 'lr', but parameter group {i} has only {names}"
                advice = "Leave out the schedule, or set options in the method hyper of a transform"
                msg = f"TrainState.create(schedule=...): {reason}. {advice}."
                raise OptimizerError(msg)
            self._rates.append(((i, "lr"), group["lr"]))

    def __call__(self, update: int) -> Assignments:
        """Return the learning rates of an update.

        Raises:
            ArgumentError: the schedule did not return a finite number, 0 or more.
        """
        factor = self._factor(update)
        is_number = isinstance(factor, (int, float)) and math.isfinite(factor)
        if not is_number or factor < 0:
            needs = "a factor of the learning rate: a finite number, 0 or more"
            msg = f"The schedule returned {factor!r} for update {update}. Expected {needs}."
            raise ArgumentError(msg)
        return {at: rate * factor for at, rate in self._rates}


def _check_pure(factor: Schedule) -> None:
    """Reject a function that counts its calls or is random, because a run could not resume.

    Raises:
        ArgumentError: the function returned different factors for the same update.
    """
    try:
        first, _, again = (factor(update) for update in (0, 1, 0))
    except Exception:  # noqa: BLE001 - the step raises this error
        return
    numbers = isinstance(first, (int, float)) and isinstance(again, (int, float))
    if numbers and repr(first) != repr(again):
        msg = (
            f"The schedule returned {first!r} for update 0, and {again!r} when it was called again"
            " for update 0. It must depend only on the update number, not on earlier calls or"
            " random numbers. To follow a loss, use af.reduce_lr_on_plateau or the method hyper"
            " of a transform."
        )
        raise ArgumentError(msg)


# Warnings about schedules with factors that are too small to train.


_LEAST_PEAK = 0.01
"""If all factors are smaller, the schedule probably returns learning rates, not factors."""
_NOTHING = 1e-9
"""No schedule reaches a smaller factor above 0 so soon, except if it counts epochs."""
_SHORT = 10
"""So many updates at a rate of 0 are normal at the end of a run, if its length was rounded."""
_LONGEST = 10**8
"""Later updates are not checked: `state.step` from a file may be huge, and take hours."""


def advise_of_rates(schedule: Schedule) -> None:
    """Warn about a schedule that probably returns learning rates instead of factors."""
    if isinstance(schedule, from_torch):
        return
    factors, name = list(_factors(schedule)), qualname(schedule)
    peak = max(factors, default=0.0)
    if any(0 < factor < _NOTHING for factor in factors[:100]):
        advise(
            f"schedule={name}: a schedule gets the number of the update, not of the epoch. This one"
            f" returns less than {_NOTHING} within 100 updates, so the parameters hardly change"
            " then. If your function expects an epoch, call it with"
            " update // data.updates_per_epoch."
        )
    elif 0 < peak < _LEAST_PEAK:
        advise(
            f"schedule={name}: a schedule returns factors of the optimizer's learning rate, and"
            f" the largest factor here is only {peak:g}. If the function returns learning rates,"
            f" pass lr={peak:g} to the optimizer, and divide by it:"
            f" schedule=lambda update: rate(update) / {peak:g}."
        )


def advise_of_end(rates: Rates, update: int, looks_at: float) -> float:
    """Warn once if updates continue although the schedule stays at 0.

    The caller calls this function in updates with learning rates of 0, from update `looks_at`
    on. The function returns the next update to check. It warns only after a tenth of the run at
    0, because a few last updates at 0, from a rounded length of the schedule, are harmless.
    """
    if update < looks_at or update > _LONGEST:
        return looks_at
    since = max(_SHORT, update // 10)
    start = update - since
    samples = sorted({start * i // 20 for i in range(21)})
    live = [number for number in samples if number >= 0 and not _is_zero(rates, number)]
    later = (update + 1 + round(update * i / 5) for i in range(20))
    zeros = (_is_zero(rates, number) for number in (*range(start, update), *later))
    if not live or live[-1] >= start or not all(zeros):
        return update + since
    first = live[-1] + 1
    while not _is_zero(rates, first):
        first += 1
    advise(
        f"The schedule's learning rate is 0 since update {first}, and this is update {update}:"
        " the optimizer no longer changes the parameters. Make the schedule as long as the run,"
        " for example af.schedules.linear(epochs * data.updates_per_epoch), let it end above 0,"
        " or end the run."
    )
    return math.inf


def _factors(schedule: Schedule) -> Iterator[float]:
    """Yield the factors of some updates, up to about a million, or until an error."""
    far = {round(100 * 1.37**i) for i in range(30)}
    for update in (*range(100), *sorted(far)):
        try:
            factor = schedule(update)
        except Exception:  # noqa: BLE001 - the step raises this error
            return
        if isinstance(factor, (int, float)):
            yield float(factor)


def _is_zero(rates: Rates, update: int) -> bool:
    """Return whether all learning rates are 0 at an update, or the schedule has ended."""
    try:
        values = rates(update)
    except Exception:  # noqa: BLE001 - after its end, a schedule may raise
        return True
    return not any(value for (_, key), value in values.items() if key == "lr")
