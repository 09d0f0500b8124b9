# SPDX-License-Identifier: Apache-2.0
"""Foresight: the calls of a program on a number of ranks on which it has not run.

They are those of the runs that there were, whose payload is followed along a straight line in
the number of ranks. What does not lie on one is refused, by name.
"""

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import NoReturn

import attrs

from accelfn.errors import ArgumentError
from accelfn.testing.simulation.entries import Entry
from accelfn.testing.simulation.wire import Given, given

_PARTS: Mapping[str, Callable[[int], int]] = {
    "reduce_scatter": lambda size: size,
    "reduce_scatter_single": lambda size: size,
    "scatter": lambda size: size - 1,
    "all_to_all": lambda size: size - 1,
    "all_to_all_single": lambda size: size - 1,
}
"""How many parts for others a rank gives, by collective; of the rest, one."""


def foreseen(logs: Mapping[int, Sequence[Entry]], ranks: int) -> list[Given]:
    """Return what ranks give to each collective, in order, on that many ranks.

    Args:
        logs: by the number of ranks, of at least three runs.
        ranks: how many there would be.

    Raises:
        ArgumentError: it cannot be known from these runs.
    """
    if len(logs) < 3:
        known = " and ".join(map(str, logs))
        _refuse(ranks, f"it ran on {known} only, and three points tell a straight line")
    _check_same_calls(logs, ranks)
    return [
        _foreseen(dict(zip(logs, entries, strict=True)), ranks)
        for entries in zip(*logs.values(), strict=True)
    ]


def _check_same_calls(logs: Mapping[int, Sequence[Entry]], ranks: int) -> None:
    """Refuse programs that make other calls where there are more ranks."""
    (first, calls), *others = logs.items()
    for size, entries in logs.items():
        for entry in entries:
            if len(entry.ranks) < size:
                among = entry.group or "two ranks"
                _refuse(ranks, f"{_named(entry)} is not of all ranks, but of {among}")
    for size, entries in others:
        for a, b in zip(calls, entries, strict=False):
            if _known_by(a) != _known_by(b):
                on = f"{_named(a)} on {first} ranks is {_named(b)} on {size}"
                _refuse(ranks, on)
        if len(calls) != len(entries):
            shorter, longer = sorted((calls, entries), key=len)
            more = first if longer is calls else size
            _refuse(ranks, f"{_named(longer[len(shorter)])} is on {more} ranks only")


def _known_by(entry: Entry) -> tuple[object, ...]:
    return entry.kind, entry.op, entry.label, entry.step


def _foreseen(entries: Mapping[int, Entry], ranks: int) -> Given:
    """Return what ranks would give to one collective."""
    found = {size: given(entry) for size, entry in entries.items()}
    like = next(iter(found.values()))
    parts = _PARTS.get(like.kind, lambda _: 1)
    part = _on_a_line({n: Fraction(e.most, parts(n)) for n, e in found.items()}, ranks)
    most = None if part is None else part * parts(ranks)
    if all(each.most * size == each.total for size, each in found.items()):
        total = None if most is None else most * ranks  # ranks give alike
    elif all(each.most == each.total for each in found.values()):
        total = most  # one of them gives
    else:
        total = _on_a_line(
            {n: Fraction(each.total) for n, each in found.items()}, ranks
        )
    if total is None or most is None:
        told = ", ".join(f"{each.total:,} on {size}" for size, each in found.items())
        entry = next(iter(entries.values()))
        _refuse(ranks, f"the bytes that ranks give to {_named(entry)} are {told}")
    return attrs.evolve(like, ranks=ranks, most=int(most), total=int(total))


def _on_a_line(values: Mapping[int, Fraction], at: int) -> Fraction | None:
    """Return where a straight line through all points is, if there is one that does not fall.

    What falls is something whole that ranks have cut into parts. Its parts may be filled up,
    or the last of them be smaller, as it is on some numbers of ranks and on others not.
    """
    (x, y), (other_x, other_y), *_ = ((n, Fraction(y)) for n, y in values.items())
    slope = (other_y - y) / (other_x - x)
    if slope < 0 or any(y + slope * (n - x) != each for n, each in values.items()):
        return None
    found = y + slope * (at - x)
    return found if found.denominator == 1 else None


def _named(entry: Entry) -> str:
    label = "" if entry.label is None else f" {entry.label!r}"
    step = "before any update" if entry.step is None else f"at update {entry.step}"
    return f"{entry.kind}{label} {step} ({entry.site})"


def _refuse(ranks: int, why: str) -> NoReturn:
    msg = (
        f"What the program sends on {ranks} ranks cannot be foreseen: {why}. Let it run on"
        f" as many simulated ranks: communication(fn, ranks=[{ranks}])."
    )
    raise ArgumentError(msg)
