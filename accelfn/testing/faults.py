# SPDX-License-Identifier: Apache-2.0
"""Faults: what goes wrong in a simulated world, planned by rank, place and update."""

import signal
from typing import TYPE_CHECKING, ClassVar

import attrs
import torch

from accelfn.errors import ArgumentError

if TYPE_CHECKING:
    from accelfn.testing.calls import Call


class Unwound(BaseException):  # noqa: N818 - no error: how a rank is taken off its thread
    """Ends a rank where it stands; `except Exception` does not catch it."""

    def __init__(self, how: str) -> None:
        """Take how the rank ended, for the table."""
        super().__init__(how)
        self.how = how


class Left(Unwound):
    """The rank left, as if its function had returned."""


class Crashed(Unwound):
    """The rank crashed, as by a kill: no `except Exception`, no further collective."""


class RankFaultError(RuntimeError):
    """What a planned `Raise` raises, unless told otherwise."""


def _check_rank(_: object, attribute: "attrs.Attribute[int]", value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        msg = f"{attribute.name}={value!r}: expected a rank, 0 or more."
        raise ArgumentError(msg)


def _check_at(_: object, __: object, value: object) -> None:
    fine = isinstance(value, str) or (isinstance(value, int) and value >= 0)
    if isinstance(value, bool) or not fine:
        msg = (
            f"at={value!r}: expected the index of one of the rank's collectives, 0 or"
            " more, or a label."
        )
        raise ArgumentError(msg)


@attrs.frozen
class Fault:
    """Something that happens once, as a rank enters a collective.

    Attributes:
        rank: to whom.
        at: the index of the rank's collective, from 0, or the label of one; the first that
            fits.
        step: only at this update of the state, or None for any.
    """

    rank: int = attrs.field(validator=_check_rank)
    at: int | str = attrs.field(default=0, validator=_check_at)
    step: int | None = attrs.field(default=None, kw_only=True)

    on_receipt: ClassVar[bool] = False

    def fits(self, call: "Call") -> bool:
        """Whether it happens at this call."""
        if call.rank != self.rank or (self.step is not None and call.step != self.step):
            return False
        return self.at == (call.label if isinstance(self.at, str) else call.index)

    def delay(self) -> float:
        """Return by how many virtual seconds the rank comes late."""
        return 0.0

    def strike(self, call: "Call") -> None:
        """Let it happen, before the rank's part is posted."""

    def touch(self, call: "Call") -> None:
        """Let it happen to what the rank received."""


@attrs.frozen
class Raise(Fault):
    """The rank raises an exception."""

    error: Exception | type[Exception] = attrs.field(
        default=RankFaultError, kw_only=True
    )

    def strike(self, call: "Call") -> None:
        """Raise it."""
        if isinstance(self.error, Exception):
            raise self.error
        msg = f"planned: {self!r}"
        raise self.error(msg)


@attrs.frozen
class Leave(Fault):
    """The rank leaves early, as if its function had returned None."""

    def strike(self, call: "Call") -> None:
        """Unwind the rank."""
        how = f"left early before {call.kind} #{call.index}, as planned"
        raise Left(how)


@attrs.frozen
class Crash(Fault):
    """The rank is gone, as if killed: `except Exception` does not see it."""

    def strike(self, call: "Call") -> None:
        """Unwind the rank."""
        how = f"crashed before {call.kind} #{call.index}, as planned"
        raise Crashed(how)


@attrs.frozen
class Stall(Fault):
    """The rank is late by virtual seconds; by more than the world's timeout, it is lost."""

    seconds: float = attrs.field(default=float("inf"), kw_only=True)

    def delay(self) -> float:
        """Return the seconds."""
        return self.seconds


@attrs.frozen
class Corrupt(Fault):
    """One element of what the rank receives is off by one."""

    element: int = attrs.field(default=0, kw_only=True)

    on_receipt: ClassVar[bool] = True

    def touch(self, call: "Call") -> None:
        """Change the element."""
        filled = [each for each in call.fills if each.numel()]
        if filled:
            wrong = filled[0].detach()
            where = self.element % wrong.numel()
            index = torch.unravel_index(torch.tensor(where), wrong.shape)
            if wrong.dtype is torch.bool:
                wrong[index] = ~wrong[index]
            else:
                wrong[index] += 1


@attrs.frozen
class Terminate(Fault):
    """The rank gets SIGTERM: the process's handler runs in it, or it ends as by a kill.

    Python runs real signal handlers in the main thread only, and ranks are threads: the
    handler that `signal.getsignal` finds is called in the rank's thread instead.
    """

    def strike(self, call: "Call") -> None:
        """Call the handler."""
        handler = signal.getsignal(signal.SIGTERM)
        if callable(handler):
            handler(signal.SIGTERM, None)
        elif handler is not signal.SIG_IGN:
            how = f"ended by SIGTERM before {call.kind} #{call.index}, as planned"
            raise Crashed(how)
