# SPDX-License-Identifier: Apache-2.0
"""Warnings of schedules that run, and train next to nothing."""

import math
from collections.abc import Iterator

from accelfn.base.advice import advise
from accelfn.base.signatures import qualname
from accelfn.schedules.of_torch import from_torch
from accelfn.schedules.rates import Rates
from accelfn.schedules.schedule import Schedule

_LEAST_PEAK = 0.01
"""No warm-up or decay has so small a factor at all updates; most learning rates are smaller."""
_SHORT = 10
"""So many updates at a rate of 0 are a run's rounded end."""
_LONGEST = 10**8
"""Updates; a file may say that a state took more, and looking at each takes hours."""


def advise_of_rates(schedule: Schedule | None) -> None:
    """Warn of a function whose factors are all so small that they are likely rates."""
    if schedule is None or isinstance(schedule, from_torch):
        return
    peak = max(_factors(schedule), default=0.0)
    if 0 < peak < _LEAST_PEAK:
        name = qualname(schedule)
        advise(
            f"schedule={name} gives factors of the optimizer's learning rate, of which the"
            f" largest is {peak:g}: no update would take more than that part of it. If they"
            f" are learning rates, give the optimizer lr={peak:g}, and divide by it:"
            f" schedule=lambda update: rate(update) / {peak:g}."
        )


def advise_of_end(rates: Rates, update: int, looks_at: float) -> float:
    """Warn when updates go on though the schedule has come to 0 for good.

    Called at an update whose rates are 0, from update `looks_at` on; returns when to look
    again. It looks when a tenth of the run was at 0, lest it be the last few updates of a
    schedule whose length was rounded, and warns once.
    """
    if update < looks_at or update > _LONGEST:
        return looks_at
    since = max(_SHORT, update // 10)
    start = update - since
    spread = {start * i // 20 for i in range(21)}
    live = [each for each in sorted(spread) if each >= 0 and not _is_zero(rates, each)]
    later = (update + 1 + round(update * i / 5) for i in range(20))
    if not live or live[-1] >= start:
        return update + since
    if not all(_is_zero(rates, each) for each in (*range(start, update), *later)):
        return update + since
    first = live[-1] + 1
    while not _is_zero(rates, first):
        first += 1
    advise(
        f"The schedule's learning rate is 0 from update {first} on, and this is update"
        f" {update}: the optimizer changes nothing any more. Make the schedule as long as the"
        " run, af.schedules.linear(epochs * data.updates_per_epoch) say, let it end above 0,"
        " or end the run."
    )
    return math.inf


def _factors(schedule: Schedule) -> Iterator[float]:
    """Yield factors of updates in no regular distance, up to some million; or until it ends."""
    far = {round(100 * 1.37**i) for i in range(30)}
    for update in (*range(100), *sorted(far)):
        try:
            factor = schedule(update)
        except Exception:  # noqa: BLE001 - it is the step's to tell
            return
        if isinstance(factor, (int, float)):
            yield float(factor)


def _is_zero(rates: Rates, update: int) -> bool:
    """Whether all learning rates are 0 at an update; past the schedule's end they are."""
    try:
        found = rates(update)
    except Exception:  # noqa: BLE001 - none is taken
        return True
    return not any(value for (_, key), value in found.items() if key == "lr")
