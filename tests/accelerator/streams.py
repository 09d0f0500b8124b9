# SPDX-License-Identifier: Apache-2.0
"""Streams of the fake accelerator: what a copy on a side stream needs, and who may forget it.

Work of the computing stream ends before it returns. A copy to the device that nobody waits for, on
another stream, is done when the stream that computes waits for that one, or for an event behind it;
until then, NaN is where it goes. NaN it stays where the memory is of the computing stream, for
which the side stream has not waited since: what had it before may still be written. Memory that
is let go while a copy to it is under way is an error of whoever waits next.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import attrs
import torch

_ALONE = 3
"""How many have the memory of a copy that nobody else has: it, and two that count."""
UNDER_WAY: list["Copy"] = []
_ticks = count(1)
_had: dict[int, int] = {}
"""When the computing stream had memory, by its address."""
_local = threading.local()


@attrs.define(eq=False)
class Copy:
    """A copy that is under way to a tensor of the host or the device."""

    target: torch.Tensor | None
    carry_out: Callable[[torch.Tensor], None]

    def end(self) -> None:
        """Be done, once."""
        target, self.target = self.target, None
        if target is not None:
            UNDER_WAY.remove(self)
            is_lost = _has_it_alone(target)
            assert not is_lost, "memory was let go while a copy was under way to it"
            self.carry_out(target)


def _has_it_alone(tensor: torch.Tensor) -> bool:
    """Whether nobody else has a tensor's memory."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) < _ALONE


class Event:
    """A place in a stream."""

    def __init__(self, device: torch.device | None = None, **_: Any) -> None:
        self._copies: list[Copy] | None = None

    def record(self, stream: Any = None) -> None:
        self._copies = list((stream or current()).copies)

    def wait(self, stream: Any = None) -> None:
        (stream or current()).wait_event(self)

    def synchronize(self) -> None:
        for copy in self.copies:
            copy.end()

    @property
    def copies(self) -> list[Copy]:
        """Return what is under way before it."""
        assert self._copies is not None, "an event that was not recorded"
        return self._copies


class Stream:
    """A queue of copies; that of the stream that computes is always empty."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.copies: list[Copy] = []
        self.seen = 0

    def wait_stream(self, other: "Stream") -> None:
        if other is COMPUTES:
            self.seen = next(_ticks)
        self._take(other.copies)

    def wait_event(self, event: Event) -> None:
        self._take(event.copies)

    def record_event(self, event: Event | None = None) -> Event:
        found = event or Event()
        found.record(self)
        return found

    def synchronize(self) -> None:
        for copy in self.copies:
            copy.end()
        self.copies.clear()

    def _take(self, copies: list[Copy]) -> None:
        """Go on behind copies."""
        self.copies += [copy for copy in copies if copy.target is not None]
        if self is COMPUTES:
            self.synchronize()


COMPUTES = Stream()


def current(_: Any = None) -> Stream:
    """Return the stream of this thread."""
    return getattr(_local, "stream", COMPUTES)


@contextmanager
def on(stream: Stream | None) -> Iterator[None]:
    """Let what is given to the device in the block go to a stream."""
    before = current()
    _local.stream = stream or before
    try:
        yield
    finally:
        _local.stream = before


def is_aside() -> bool:
    """Whether what is given to the device goes to another stream than that which computes."""
    return current() is not COMPUTES


def have(tensor: torch.Tensor) -> None:
    """Note memory of the device that this thread's stream has from now on."""
    if is_aside():
        _had.pop(tensor.untyped_storage().data_ptr(), None)
    else:
        _had[tensor.untyped_storage().data_ptr()] = next(_ticks)


def queue(target: torch.Tensor, carry_out: Callable[[torch.Tensor], None]) -> None:
    """Queue a copy behind what is on this thread's stream; it is lost where another writes."""
    stream = current()
    if _had.get(target.untyped_storage().data_ptr(), 0) <= stream.seen:
        before = [copy for copy in stream.copies if copy.target is not None]
        UNDER_WAY.append(Copy(target.detach(), carry_out))
        stream.copies = [*before, UNDER_WAY[-1]]
