# SPDX-License-Identifier: Apache-2.0
"""What torch asks a kind of device for, of the meta device: how many, and streams to wait for."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch

# torch finds the module of a kind of device by its name, and has none of meta
# pyright: reportPrivateUsage=false


class _Stream(torch.cpu.Stream):
    """A stream on which nothing waits for anything, as the CPU's, with an event to show."""

    def record_event(self, event: Any = None) -> Any:
        """Return an event that has come."""
        del event
        return torch.cpu.Event()


class _Meta:
    """The one device of its kind."""

    Stream, Event = _Stream, torch.cpu.Event
    stream = staticmethod(torch.cpu.stream)

    @staticmethod
    def device_count() -> int:
        """Return how many there are for a rank."""
        return 1

    @staticmethod
    def current_device() -> int:
        """Return its number."""
        return 0

    @staticmethod
    def is_initialized() -> bool:
        """Return whether there is nothing to set up any more."""
        return True

    @staticmethod
    def current_stream(device: Any = None) -> _Stream:
        """Return a stream."""
        del device
        return _Stream()


@contextmanager
def known_to_torch(device: torch.device) -> Generator[None]:
    """Let torch find a module of the meta device, while ranks are on it."""
    name = device.type
    if name != "meta" or hasattr(torch, name):
        yield
        return
    setattr(torch, name, _Meta)
    try:
        yield
    finally:
        delattr(torch, name)
