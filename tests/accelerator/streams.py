# SPDX-License-Identifier: Apache-2.0
"""Streams of the fake accelerator: what they are given is done at once, and who waits is noted.

What hardware might do in another order, or at once, is an error: a race. So is memory that is let
go while a copy to it is under way, of whoever waits for that next. What is copied to the host for
which it does not wait has arrived when it does wait, and is nothing until then; what is copied
from there is the host's to change when it has waited.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import torch

from tests.accelerator import races

_ALONE = 2
"""How many have the memory of a copy that nobody else has: what is noted here, twice."""
UNDER_WAY: list[tuple[torch.Tensor, races.Moment]] = []
"""What a copy on a side stream goes to, and when, until the stream that computes waits."""
_local = threading.local()


@attrs.frozen(eq=False)
class _Sent:
    """A copy between the device and the host, for which that has not waited.

    Attributes:
        memory: the host's.
        values: that were copied.
        moment: when.
        is_to_host: whether it goes there.
    """

    memory: torch.Tensor
    values: torch.Tensor
    moment: races.Moment
    is_to_host: bool


_SENT: list[_Sent] = []


class Event:
    """A place in a stream."""

    def __init__(self, device: torch.device | None = None, **_: Any) -> None:
        self._clock: races.Clock | None = None

    def record(self, stream: Any = None) -> None:
        self._clock = races.Clock()
        self._clock.join((stream or current()).clock)

    def wait(self, stream: Any = None) -> None:
        (stream or current()).wait_event(self)

    def synchronize(self) -> None:
        _host_waits(self.clock)

    @property
    def clock(self) -> races.Clock:
        """Return what is done at it."""
        assert self._clock is not None, "an event that was not recorded"
        return self._clock


class Stream:
    """A queue of the device's."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.clock = races.Clock()

    def wait_stream(self, other: "Stream") -> None:
        self._come_behind(other.clock)

    def wait_event(self, event: Event) -> None:
        self._come_behind(event.clock)

    def record_event(self, event: Event | None = None) -> Event:
        found = event or Event()
        found.record(self)
        return found

    def synchronize(self) -> None:
        _host_waits(self.clock)

    def _come_behind(self, clock: races.Clock) -> None:
        self.clock.join(clock)
        if self is COMPUTES:
            _arrive([each for each in UNDER_WAY if clock.is_behind(each[1])])


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


def synchronize(_: Any = None) -> None:
    """Let the host wait for all streams."""
    _arrive([*UNDER_WAY])
    races.all_is_done()
    _host_has([*_SENT])


def send(target: torch.Tensor) -> None:
    """Note that a copy of this thread's stream, for which nobody waits, is under way."""
    clock = current().clock
    if races.is_anothers(clock, target):
        UNDER_WAY.append((target.detach(), clock.now()))


def sent_to_host(target: torch.Tensor) -> None:
    """Note that what the host has just been given will be there once it waits for it."""
    values, moment = target.detach().clone(), current().clock.now()
    _SENT.append(_Sent(target.detach(), values, moment, is_to_host=True))
    garbage = float("nan") if target.is_floating_point() else 77
    target.detach().fill_(garbage)


def sent_from_host(source: torch.Tensor) -> None:
    """Note that the host may not write over what it has given until it has waited."""
    values, moment = source.detach().clone(), current().clock.now()
    _SENT.append(_Sent(source.detach(), values, moment, is_to_host=False))


def _host_waits(clock: races.Clock) -> None:
    races.HOST.join(clock)
    _host_has([each for each in _SENT if races.HOST.is_behind(each.moment)])


def _host_has(sent: list[_Sent]) -> None:
    """Let copies have ended of which the host knows."""
    for each in sent:
        _SENT.remove(each)
        if each.is_to_host:
            each.memory.copy_(each.values)
    is_alike = all(
        each.is_to_host
        or torch.equal(each.memory.nan_to_num(), each.values.nan_to_num())
        for each in sent
    )
    assert is_alike, "the host wrote over what was being copied from it"


def _arrive(copies: list[tuple[torch.Tensor, races.Moment]]) -> None:
    """Let copies have ended, to memory that somebody still has."""
    for copy in copies:
        UNDER_WAY.remove(copy)
    is_lost = any(_has_it_alone(target) for target, _ in copies)
    assert not is_lost, "memory was let go while a copy was under way to it"


def _has_it_alone(tensor: torch.Tensor) -> bool:
    """Whether nobody else has a tensor's memory."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) <= _ALONE
