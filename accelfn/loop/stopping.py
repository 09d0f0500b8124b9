# SPDX-License-Identifier: Apache-2.0
"""Ending a run when the system asks for it: at a step's end, on all ranks together."""

import signal
import sys
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch

from accelfn.base.calling import called
from accelfn.base.question import question
from accelfn.collectives import reduce
from accelfn.collectives.agreed import check_world
from accelfn.errors import ArgumentError
from accelfn.world import World


class Stop:
    """Whether this run was asked to end; see `af.stopping`."""

    def __init__(self, world: World) -> None:
        """Begin unasked."""
        self._world, self._agreed = world, 0
        self.received = 0  # what this rank alone was sent

    @question
    def requested(self) -> bool:
        """Return whether any rank was asked to end, the same on all: call it on all ranks.

        Once it is true it stays so, and costs nothing.

        Cost: an all-reduce of one integer.
        """
        if not self._agreed:
            mine = torch.tensor(self.received, device=self._world.device)
            self._agreed = int(reduce(mine, self._world, "max", label="stopping"))
        return bool(self._agreed)

    @property
    def signal(self) -> signal.Signals | None:
        """The signal that all ranks have agreed on."""
        return signal.Signals(self._agreed) if self._agreed else None


_asked = threading.local()
"""Each thread's `Stop`: simulated ranks are threads."""


def deliver(number: int, _frame: FrameType | None = None) -> bool:
    """Note a signal for this thread's `Stop`; return whether there is one.

    Does nothing else, for it runs between any two instructions. A second Ctrl-C raises
    KeyboardInterrupt, for the first may take its time.
    """
    stop: Stop | None = getattr(_asked, "stop", None)
    if stop is None:
        return False
    if number == signal.SIGINT and stop.received:
        raise KeyboardInterrupt
    stop.received = int(number)
    return True


@called
@contextmanager
def stopping(
    world: World,
    signals: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGINT),
) -> Generator[Stop]:
    """Take signals that ask a process to end, and let all ranks end at the same step.

    Inside the block such a signal is only noted. Ask `requested()` at each step's end, on
    all ranks; when it is true, save and leave the block, which ends the process with exit
    code 128 plus the signal's number: 143 after SIGTERM. A scheduler that sees it knows that
    the run was not finished. Left without such a request, the block ends nothing; a signal
    that came after it was last asked for comes again, as if there were no block. Where an
    error ends it, the signal comes again to its handler, if it has one, unless the error is
    what it has led to; its default action would hide the error, which goes on instead.

    A rank that waits in a collective notes nothing before that ends. Where another rank may
    hang, give `World.from_env(timeout=...)` less than the time that the scheduler leaves
    between its signal and SIGKILL, 30 s for torchrun and `accelfn launch`: the error comes
    then, and names the rank.

    Args:
        world: whose ranks end together, whichever of them was asked.
        signals: which.

    Law: all ranks leave after the same update, whichever of them got the signal, and when.

    Raises:
        ArgumentError: something is no signal that can be taken.

    Example:
        >>> with stopping(World.single()) as stop:
        ...     stop.requested()
        False
    """
    check_world("af.stopping", world)
    if not isinstance(signals, Sequence):
        msg = f"af.stopping(signals={signals!r}): expected a list of signals."
        raise ArgumentError(msg)
    stop, before = Stop(world), getattr(_asked, "stop", None)
    handlers: dict[int, Any] = {}
    again = True
    try:
        _asked.stop = stop
        if threading.current_thread() is threading.main_thread():
            for each in dict.fromkeys(signals):
                handlers[each] = _take(each)
        yield stop
    except BaseException as error:
        is_handled = callable(handlers.get(stop.received))
        again = is_handled and not _has_become(stop.received, error)
        raise
    finally:
        for each, handler in handlers.items():
            signal.signal(each, signal.SIG_DFL if handler is None else handler)
        _asked.stop = before  # last: what comes meanwhile is noted
        if again and stop.signal is None and stop.received in handlers:
            signal.raise_signal(stop.received)
    if stop.signal is not None:
        sys.exit(128 + stop.signal)


def _has_become(number: int, error: BaseException) -> bool:
    """Return whether an exception is how a signal ends a process."""
    if isinstance(error, SystemExit):
        return error.code == 128 + number
    return isinstance(error, KeyboardInterrupt) and number == signal.SIGINT


def _take(number: signal.Signals) -> Any:
    try:
        return signal.signal(number, deliver)
    except (ValueError, OSError, TypeError) as error:
        msg = f"af.stopping(signals=...): {number!r} cannot be taken: {error}."
        raise ArgumentError(msg) from error
