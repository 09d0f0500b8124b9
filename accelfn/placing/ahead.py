# SPDX-License-Identifier: Apache-2.0
"""What is called next is sent ahead on a stream, while what is here computes."""

from contextlib import ExitStack
from typing import Any

import attrs
import torch
from torch import nn

from accelfn.base.accelerator import pins
from accelfn.placing.guests import Guest


@attrs.define(eq=False)
class Ahead:
    """Sends the parameters of the module that is called next, while this one computes.

    It is foreseen from the two modules that were called last: next is the one that followed
    these two, in this order, the last time.

    Attributes:
        device: that computes.
        room: how many bytes of parameters that come and go may be on the device at a time.
        side: the stream on which it is sent.
    """

    device: torch.device
    room: int
    side: Any
    _all: set[Guest] = attrs.field(factory=set, init=False)
    _sent: tuple[Guest, ...] = attrs.field(default=(), init=False)
    _last: tuple[tuple[Guest, ...], ...] = attrs.field(default=(), init=False)
    _next: dict[Any, tuple[Guest, ...]] = attrs.field(factory=dict, init=False)
    _runs: bool = attrs.field(default=False, init=False)

    @classmethod
    def on(cls, device: torch.device, room: int) -> "Ahead | None":
        """Return one for a device that has streams, and copies from pinned memory."""
        if not pins(device):
            return None
        module: Any = torch.get_device_module(device)
        return cls(device, room, module.Stream(device))

    def within(self, stack: ExitStack, model: nn.Module) -> None:
        """Send within passes of a model; between them it may be given other values."""

        def begin(_module: nn.Module, _args: Any) -> None:
            self._turn(runs=True)

        def end(_module: nn.Module, _args: Any, _output: Any) -> None:
            self._turn(runs=False)

        stack.callback(self._turn, runs=False)
        stack.callback(model.register_forward_pre_hook(begin, prepend=True).remove)
        stack.callback(model.register_forward_hook(end, always_call=True).remove)

    def receive(self, guests: tuple[Guest, ...]) -> None:
        """Hear whose module is called: what was sent for it is there now, and no other is kept."""
        if not self._runs:
            return
        self._all.update(guests)
        self._next[self._last] = guests
        self._last = (*self._last[-1:], guests)
        self._wait(guests)

    def send(self) -> None:
        """Send what is foreseen, if there is room for it beside what is on the device."""
        if not self._runs:
            return
        some = tuple(g for g in self._next.get(self._last, ()) if _can_be_sent(g))
        here = sum(guest.home.nbytes for guest in self._all if guest.uses)
        if not some or here + sum(g.home.nbytes for g in some) > self.room:
            return
        module: Any = torch.get_device_module(self.device)
        self._sent = some
        # memory of the stream that computes, which uses it and gets it back
        targets = [torch.empty_like(g.home, device=self.device) for g in some]
        self.side.wait_stream(module.current_stream(self.device))
        with module.stream(self.side):
            for guest, target in zip(some, targets, strict=True):
                guest.ahead = target.copy_(guest.home, non_blocking=True)

    def _wait(self, guests: tuple[Guest, ...] = ()) -> None:
        """Let the stream that computes go on behind what was sent, and keep some of it."""
        if not self._sent:
            return
        module: Any = torch.get_device_module(self.device)
        module.current_stream(self.device).wait_stream(self.side)
        for guest in self._sent:
            if guest not in guests:
                guest.ahead = None
        self._sent = ()

    def _turn(self, *, runs: bool) -> None:
        self._wait()
        self._runs, self._last = runs, ()


def _can_be_sent(guest: Guest) -> bool:
    away = guest.home.device != guest.device
    return away and not guest.uses and guest.home.is_pinned()
