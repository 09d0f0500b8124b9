# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C comes before an update or after it, and never takes the state that it makes.

Python runs a signal's handler between two instructions of the main thread, wherever that is.
An exception from one in the midst of an update leaves tensors that nobody can tell; one that
comes between a step's end and the caller's assignment takes the only record of the new
state. So from the moment in which a state is given away until the step has returned, the
signal is noted, and sent again when the caller has what the step returned.

The handler is exchanged for those milliseconds alone, by the functions of `signal` in C,
for what Python wraps around them takes ten times as long. Other signals, and exceptions that
debuggers and notebooks raise in a thread by themselves, are not held: there is `af.salvage`.
"""

import _signal  # pyright: ignore[reportMissingImports]
import functools
import signal
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
_POLL, _LONGEST_POLL = 1e-4, 0.05
"""Seconds; a step that holds a signal back is over in about as many as the first."""

_set: Any = _signal.signal
_get: Any = _signal.getsignal
_this_thread = threading.get_ident
_main_thread = threading.main_thread


class holding(AbstractContextManager["holding"]):
    """Hold Ctrl-C back from `begin()` to the end of a `with` block, in the main thread.

    A second one goes to its handler at once, for an update may hang. Whoever returns from the
    block must do nothing more: CPython looks for signals where functions begin, where loops
    turn round, and behind calls. Behind calls of Python's own functions it looks, too, while
    another evaluates their frames, as `torch.compile` may, and so between a `return` and the
    assignment of what it returns.
    """

    __slots__ = (
        "_is_asked",
        "_is_over",
        "_is_sent",
        "_noted",
        "_on_the_way",
        "_previous",
    )

    def __init__(self) -> None:
        """Hold nothing yet."""
        self._previous: Any = None
        self._noted = self._is_over = self._is_asked = self._is_sent = False
        self._on_the_way: dict[FrameType, int | None] = {}

    def begin(self) -> None:
        """Hold it from now on, if there is a handler in Python that it would come to."""
        if self._previous is None and _this_thread() == _main_thread().ident:
            handler = _get(signal.SIGINT)
            if callable(handler):  # else the process ignores it, or ends by it
                self._previous = handler
                _set(signal.SIGINT, self._note)

    def __exit__(self, *error: object) -> None:
        """Put the handler back; what was held comes when the caller goes on."""
        if self._previous is None:
            return
        try:
            # looked at when none can be noted any more, or one that comes here were lost
            _set(signal.SIGINT, self._previous)
            if self._noted:
                self._send_later()
        except KeyboardInterrupt:  # it came just now
            if self._noted:
                raise
            self._send_later()
        finally:
            self._is_over = True

    def _note(self, number: int, frame: FrameType | None) -> None:
        way = self._way_out(frame)
        if self._noted or not way:
            self._previous(number, frame)
        self._noted, self._on_the_way = True, way

    def _way_out(self, frame: FrameType | None) -> dict[FrameType, int | None]:
        """Return the block's frame, and those that wait for it with the call that they are at.

        None of them if it is not running: a debugger may have broken off its very end.
        """
        way: dict[FrameType, int | None] = {}
        while frame is not None:
            if any(each is self for each in frame.f_locals.values()):
                way = {frame: None}  # a block is left at several calls
            elif way:
                way[frame] = frame.f_lasti
            frame = frame.f_back
        return way

    def _send_later(self) -> None:
        _set(signal.SIGINT, self._pass_on)
        threading.Thread(target=self._send, name="accelfn Ctrl-C", daemon=True).start()

    def _send(self) -> None:
        """Send it to the main thread until that says that the caller has the result.

        It is asked by a signal. Another thread must not look at its frames: CPython 3.11 clears
        one while it still says that it runs, and whoever meets it then reads freed memory.
        """
        main = _main_thread().ident
        while main is not None and not self._is_sent:
            self._is_asked, pause = True, _POLL
            signal.pthread_kill(main, signal.SIGINT)
            while self._is_asked:  # for long, where the next update holds it back
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_POLL)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        """Let it go to its handler, if the caller has the result; else it is sent again."""
        if self._is_over and self._has_arrived(frame):
            self._on_the_way = {}  # frames that know this block, and the caller's states
            if _get(signal.SIGINT) == self._pass_on:
                _set(signal.SIGINT, self._previous)
            self._is_sent, self._is_asked = True, False
            self._previous(number, frame)
        self._is_asked = False

    def _has_arrived(self, frame: FrameType | None) -> bool:
        """Whether no frame of the main thread is at the call still that began the block."""
        inner = None
        while frame is not None and frame not in self._on_the_way:
            frame, inner = frame.f_back, frame
        if frame is None:
            return True
        at = self._on_the_way[frame]
        # what is called from the same place again is the next update, which has not begun
        return at is not None and (at != frame.f_lasti or inner is not None)


def held(function: Callable[P, R]) -> Callable[P, R]:
    """Hold Ctrl-C back while a function runs; it goes outside of all other decorators."""

    @functools.wraps(function)
    def call(*given: P.args, **named: P.kwargs) -> R:
        with holding() as hold:
            hold.begin()
            return function(*given, **named)

    return call
