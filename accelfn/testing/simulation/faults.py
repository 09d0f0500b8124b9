# SPDX-License-Identifier: Apache-2.0
"""Faults: what goes wrong in a simulated world, planned by rank, place and update.

A fault is a record. It happens once, as its `rank` enters a collective: the one that `at`
names by its index among the rank's own, from 0, or the first that has the label `at`; and
if `step` is given, only at that update of the state. With `step` alone it happens as that
update begins, be there a collective in it or not; what is received then is that of its first.
Without either it happens at the first collective.
"""

import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import attrs
import torch
from torch.nn.parallel import distributed

from accelfn.errors import ArgumentError
from accelfn.loop.stopping import deliver

if TYPE_CHECKING:
    from types import FrameType

    from accelfn.testing.simulation.calls import Call


class Unwound(BaseException):
    """Ends a rank where it stands; `except Exception` does not catch it."""

    def __init__(self, how: str, returns: int | None = None) -> None:
        """Take how the rank ended, for the table, and when it comes back."""
        super().__init__(how)
        self.how = how
        self.returns = returns


class Left(Unwound):
    """The rank left, as if its function had returned."""


class Crashed(Unwound):
    """The rank crashed, as by a kill: no `except Exception`, no further collective."""


class RankFaultError(RuntimeError):
    """What a planned `Raise` raises, unless told otherwise."""


def _is_count(_: object, attribute: "attrs.Attribute[int]", value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        msg = f"{attribute.name}={value!r}: expected a number, 0 or more."
        raise ArgumentError(msg)


def _is_place(_: object, __: object, value: object) -> None:
    is_index = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    if value is not None and not is_index and not isinstance(value, str):
        msg = (
            f"at={value!r}: expected the index of one of the rank's collectives, 0 or"
            " more, or a label."
        )
        raise ArgumentError(msg)


def _is_duration(_: object, __: object, value: object) -> None:
    if not isinstance(value, (int, float)) or not value >= 0:
        msg = f"seconds={value!r}: expected virtual seconds, 0 or more."
        raise ArgumentError(msg)


def _is_error(_: object, __: object, value: object) -> None:
    kind = value if isinstance(value, type) else type(value)
    if not issubclass(kind, Exception):
        msg = f"error={value!r}: expected an exception or a class of exceptions."
        raise ArgumentError(msg)


def _named(value: object) -> str:
    return value.__name__ if isinstance(value, type) else repr(value)


_is_step = attrs.validators.optional(_is_count)


@attrs.frozen
class Raise:
    """The rank raises an exception.

    Attributes:
        error: the exception, or its class, which is called with a text.
    """

    rank: int = attrs.field(validator=_is_count)
    at: int | str | None = attrs.field(default=None, validator=_is_place)
    step: int | None = attrs.field(default=None, kw_only=True, validator=_is_step)
    error: Exception | type[Exception] = attrs.field(
        default=RankFaultError, kw_only=True, validator=_is_error, repr=_named
    )


@attrs.frozen
class Leave:
    """The rank leaves early, as if its function had returned None."""

    rank: int = attrs.field(validator=_is_count)
    at: int | str | None = attrs.field(default=None, validator=_is_place)
    step: int | None = attrs.field(default=None, kw_only=True, validator=_is_step)


@attrs.frozen
class Crash:
    """The rank is gone, as if killed: `except Exception` does not see it.

    Attributes:
        returns: in an elastic run, the update that another rank has begun when this one's
            function is called again, as in a process that was started in its place; None:
            it is not.
    """

    rank: int = attrs.field(validator=_is_count)
    at: int | str | None = attrs.field(default=None, validator=_is_place)
    step: int | None = attrs.field(default=None, kw_only=True, validator=_is_step)
    returns: int | None = attrs.field(default=None, kw_only=True, validator=_is_step)


@attrs.frozen
class Stall:
    """The rank is late by virtual seconds; by more than the world's timeout, it is lost."""

    rank: int = attrs.field(validator=_is_count)
    at: int | str | None = attrs.field(default=None, validator=_is_place)
    step: int | None = attrs.field(default=None, kw_only=True, validator=_is_step)
    seconds: float = attrs.field(
        default=float("inf"), kw_only=True, validator=_is_duration
    )


@attrs.frozen
class Corrupt:
    """One element of what the rank receives is off by one.

    Integers that DistributedDataParallel exchanges are passed over: it takes some for places
    in memory without a look, and a wrong one may end the process.

    Attributes:
        element: which, counted through the tensors received; round and round.
    """

    rank: int = attrs.field(validator=_is_count)
    at: int | str | None = attrs.field(default=None, validator=_is_place)
    step: int | None = attrs.field(default=None, kw_only=True, validator=_is_step)
    element: int = attrs.field(default=0, kw_only=True, validator=_is_count)


@attrs.frozen
class Terminate:
    """The rank gets SIGTERM: the process's handler runs in it, or it ends as by a kill.

    Python runs real signal handlers in the main thread only, and ranks are threads: the
    rank's `af.stopping` is told instead, or else the handler that `signal.getsignal` finds is
    called in the rank's thread.
    """

    rank: int = attrs.field(validator=_is_count)
    at: int | str | None = attrs.field(default=None, validator=_is_place)
    step: int | None = attrs.field(default=None, kw_only=True, validator=_is_step)


Fault: TypeAlias = Raise | Leave | Crash | Stall | Corrupt | Terminate


def due(faults: list[Fault], call: "Call", *, received: bool) -> list[Fault]:
    """Return the faults that happen at this call, and take them out of the plan.

    Those to what is received happen after it, the others before it is posted.
    """
    found = [
        fault
        for fault in faults
        if isinstance(fault, Corrupt) is received and _fits(fault, call)
    ]
    for fault in found:
        faults.remove(fault)
    return found


def due_as_begins(faults: list[Fault], rank: int, update: int) -> list[Fault]:
    """Return the faults that happen as a rank begins an update, and take them out."""
    found = [
        fault
        for fault in faults
        if is_of_update(fault) and (fault.rank, fault.step) == (rank, update)
    ]
    for fault in found:
        faults.remove(fault)
    return found


def is_of_update(fault: Fault) -> bool:
    """Whether its place is an update alone, and no collective."""
    alone = fault.at is None and fault.step is not None
    return alone and not isinstance(fault, Corrupt)


def delay(fault: Fault) -> float:
    """Return by how many virtual seconds a fault makes its rank late."""
    return fault.seconds if isinstance(fault, Stall) else 0.0


def strike(fault: Fault, call: "Call | None" = None) -> None:
    """Let a fault happen: to the rank, or to what it received in a call.

    Raises:
        Unwound: the rank leaves or crashes here.
        Exception: what it is to raise.
    """
    match fault:
        case Raise(error=Exception() as error):
            raise error
        case Raise(error=type() as kind):
            msg = f"planned: {fault!r}"
            raise kind(msg)
        case Leave():
            how = "left early, as planned,"
            raise Left(how)
        case Crash(returns=returns):
            how = "crashed, as planned,"
            raise Crashed(how, returns)
        case Terminate():
            _terminate()
        case Corrupt() if call is not None:
            _corrupt(call.fills, fault.element)
        case _:  # a Stall delays, and no more
            pass


def _fits(fault: Fault, call: "Call") -> bool:
    if call.rank != fault.rank or (fault.step is not None and call.step != fault.step):
        return False
    if isinstance(fault, Corrupt) and not _is_corruptible(call):
        return False
    if fault.at is None and fault.step is not None:
        return isinstance(fault, Corrupt)
    return (fault.at or 0) == (call.label if isinstance(fault.at, str) else call.index)


def _is_corruptible(call: "Call") -> bool:
    filled = [each for each in call.fills if each.numel()]
    if any(not each.dtype.is_floating_point for each in filled) and _is_in_ddp():
        return False
    return bool(filled)


def _is_in_ddp() -> bool:
    frame: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None and frame.f_code.co_filename != distributed.__file__:
        frame = frame.f_back
    return frame is not None


def _terminate() -> None:
    if deliver(signal.SIGTERM):
        return
    handler = signal.getsignal(signal.SIGTERM)
    if callable(handler):
        handler(signal.SIGTERM, None)
    elif handler is not signal.SIG_IGN:
        how = "ended by SIGTERM, as planned,"
        raise Crashed(how)


def _corrupt(tensors: Sequence[torch.Tensor], number: int) -> None:
    """Change one element, by its number through all tensors, round and round."""
    number %= sum(each.numel() for each in tensors)
    for each in tensors:
        if number < each.numel():
            place = each.detach()[_index(number, each.shape)]
            wrong = ~place if place.dtype is torch.bool else place + 1
            if torch.equal(wrong, place) or place.isnan():  # too big to notice
                wrong = torch.zeros_like(place)
            place.copy_(wrong)
            return
        number -= each.numel()


def _index(number: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the index of an element by its number in row-major order."""
    index: list[int] = []
    for length in reversed(shape):
        index.append(number % length)
        number //= length
    return tuple(reversed(index))
