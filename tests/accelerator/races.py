# SPDX-License-Identifier: Apache-2.0
"""Races of streams on the fake accelerator: memory that two have, and neither waits.

Each stream has a clock, of how much of every stream's work its own comes behind; to wait for
another is to take on what that one's says. What a stream reads must have been written before, and
what it writes read and written: otherwise hardware may do them in any order, or at once. These are
vector clocks (Fidge 1988), for streams in place of processes.
"""

from collections.abc import Iterable
from itertools import count
from typing import Any, TypeAlias

import attrs
import torch

Moment: TypeAlias = tuple[int, int]
"""A stream, by its number, and how much it had been given."""
_numbers = count()
_written: dict[int, Moment] = {}
_read: dict[int, dict[int, int]] = {}
_makers: dict[int, int] = {}
"""By the address of memory: when it was written, and last read by each stream; whose it is."""


@attrs.define(eq=False)
class Clock:
    """How much of each stream's work is done when what comes next begins."""

    behind: dict[int, int] = attrs.field(factory=dict[int, int])
    number: int = attrs.field(factory=_numbers.__next__)

    def join(self, other: "Clock") -> None:
        """Come behind what another is behind."""
        for number, at in other.behind.items():
            self.behind[number] = max(self.behind.get(number, 0), at)

    def is_behind(self, moment: Moment) -> bool:
        """Whether what was given at a moment is done before."""
        number, at = moment
        return self.behind.get(number, 0) >= at

    def now(self) -> Moment:
        """Return when the last was given."""
        return self.number, self.behind.get(self.number, 0)

    def tick(self) -> Moment:
        """Be given something to do, and return when."""
        self.behind[self.number] = self.now()[1] + 1
        return self.now()


HOST = Clock()
"""What the host has waited for, so that all it gives to any stream comes behind it."""


def have(
    clock: Clock,
    reads: Iterable[torch.Tensor],
    writes: Iterable[torch.Tensor],
    what: Any,
) -> None:
    """Let a stream read and write memory of the device.

    Raises:
        AssertionError: another may still write it, or read what is written over.
    """
    clock.join(HOST)
    read, written = _memory(reads), _memory(writes)
    for at in read | written:
        assert at not in _written or clock.is_behind(_written[at]), (
            f"a race: {what} uses what another stream may still write"
        )
    for at in written:
        assert all(map(clock.is_behind, _read.get(at, {}).items())), (
            f"a race: {what} writes over what another stream may still read"
        )
    number, moment = clock.tick()
    for at in read:
        _read.setdefault(at, {})[number] = moment
    for at in written:
        _written[at] = number, moment
        _read.pop(at, None)


def make(clock: Clock, made: Iterable[torch.Tensor]) -> None:
    """Let memory be new, which a stream has just written."""
    for at in _memory(made):
        _makers[at], _ = _written[at] = clock.now()
        _read.pop(at, None)


def is_anothers(clock: Clock, tensor: torch.Tensor) -> bool:
    """Whether another stream made memory, which it may use again when it is let go."""
    return any(_makers.get(at) != clock.number for at in _memory([tensor]))


def all_is_done() -> None:
    """Note that the host has waited for all streams."""
    HOST.behind.clear()
    _written.clear()
    _read.clear()


def _memory(tensors: Iterable[torch.Tensor]) -> set[int]:
    return {each.untyped_storage().data_ptr() for each in tensors} - {0}
