# SPDX-License-Identifier: Apache-2.0
"""Collective calls of simulated ranks: their data, log entries, reductions and faults."""

import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, reduce
from traceback import walk_stack
from typing import Any, Literal, TypeAlias, get_args

import attrs
import numpy as np
import torch
from torch.nn.parallel import distributed

from accelfn.errors import ArgumentError
from accelfn.plug import arguments, collectives, deliver


def check_choice(call: str, name: str, value: object, choices: Any) -> None:
    """Raise an error if an argument is not one of the choices of a `Literal`.

    Raises:
        ArgumentError: the value is not one of the choices.
    """
    if value not in get_args(choices):
        names = ", ".join(map(repr, get_args(choices)))
        msg = f"{call}({name}={value!r}): expected one of {names}."
        raise ArgumentError(msg)


@attrs.frozen(cache_hash=True)
class Members:
    """The ranks of one process group.

    Attributes:
        name: the name of the group, such as "tp"; empty for the whole world.
        ranks: the members as ranks of the run, in ascending order.
        generation: in an elastic run, the number of the world that the group belongs to.
    """

    name: str
    ranks: tuple[int, ...]
    generation: int = 0

    def __str__(self) -> str:
        """Return the name and ranks of the group; empty text for the whole world."""
        if not self.name:
            return ""
        return f"{self.name} of {_listed_ranks(self.ranks)}"


@attrs.define(kw_only=True, eq=False)
class Call:
    """One rank's call of a collective.

    Attributes:
        rank: the calling rank.
        index: the number of collectives that this rank called before.
        kind: torch's name of the collective, such as "all_reduce".
        sends: copies of the tensors that this rank sends.
        fills: the tensors that receive the result.
        op: the reduction, or None.
        root: the one rank that sends or receives, or None.
        peer: the other rank of a send or recv; None if a recv accepts any rank.
        tag: the tag of a send or recv.
        label: accelfn's label of the collective, or None.
        structure: the containers (dicts, lists) of the tree that accelfn sends, or None.
        step: the number of the update that made the call, or None outside a step.
        site: the file and line of the user's code that made the call.
        at: the rank's virtual time at the call, in seconds.
        group: the ranks that take part.
    """

    rank: int
    kind: str
    group: Members
    index: int = 0
    sends: tuple[torch.Tensor, ...] = ()
    fills: tuple[torch.Tensor, ...] = ()
    op: str | None = None
    root: int | None = None
    peer: int | None = None
    tag: int = 0
    label: str | None = None
    structure: str | None = None
    step: int | None = None
    site: str = ""
    at: float = 0.0

    @property
    def is_message(self) -> bool:
        """Whether the call is a send or a recv."""
        return self.kind in ("send", "recv")

    @property
    def num_bytes(self) -> int:
        """The number of bytes that this rank sends."""
        return sum(_num_bytes(send) for send in self.sends)

    @property
    def num_bytes_for_others(self) -> int:
        """The bytes of this rank that reach other ranks, unchanged or as part of a sum."""
        is_root = self.rank == self.root
        if (self.kind in _FROM_ROOT and not is_root) or (
            self.kind == "gather" and is_root
        ):
            return 0
        if self.kind in PART_FOR_EACH:
            parts = zip(self.group.ranks, self.sends, strict=True)
            return sum(_num_bytes(part) for rank, part in parts if rank != self.rank)
        return self.num_bytes

    @property
    def shapes(self) -> str:
        """The shapes and dtypes that all ranks share; for an all_to_all, those of this rank."""
        if not self.kind.startswith("all_to_all"):
            return _format_tensors(self._common())
        return (
            f"gives {_format_tensors(self.sends)}, takes {_format_tensors(self.fills)}"
        )

    def common_facts(self) -> dict[str, Any]:
        """Return the facts that must be equal in matched calls, by name."""
        common = [(t.shape, t.dtype, t.layout) for t in self._common()]
        if self.is_message:
            return {"shape or dtype": common}
        return {
            "kind": self.kind,
            "reduction": self.op,
            "root": self.root,
            "shape or dtype": common,
            "structure": self.structure,
            "label": self.label,
        }

    def row(self) -> tuple[str, ...]:
        """Return the cells that describe this call in the table of an error message."""
        root = None if self.root is None else f"root {self.root}"
        peer = {"send": "to", "recv": "from"}.get(self.kind)
        if peer is not None:
            peer = f"{peer} {'any rank' if self.peer is None else f'rank {self.peer}'}"
        tag = f"tag {self.tag}" if self.tag else None
        tree = None if self.structure == "*" else self.structure
        among = f"among {self.group}" if self.group.name else None
        details = (self.op, root, peer, tag, self.shapes, tree, among)
        return (
            f"#{self.index} {self.kind}",
            " ".join(detail for detail in details if detail),
            "" if self.label is None else repr(self.label),
            "" if self.step is None else f"update {self.step}",
            self.site,
        )

    def _common(self) -> tuple[torch.Tensor, ...]:
        if self.kind.startswith("all_to_all"):  # `_unequal_splits` compares its tensors
            return ()
        return self.fills if self.kind in _OWN_RESULT else self.sends


_FROM_ROOT = frozenset({"broadcast", "scatter"})
# in these collectives, a rank sends another tensor to each rank, and keeps its own
PART_FOR_EACH = frozenset({"scatter", "all_to_all", "all_to_all_single"})
_OWN_RESULT = frozenset({"scatter", "reduce_scatter", "reduce_scatter_single", "recv"})


def differing(calls: Sequence[Call]) -> list[str]:
    """Return the names of the facts that differ in matched calls but must be equal."""
    first, *rest = [call.common_facts() for call in calls]
    unequal = [
        name for name in first if any(other[name] != first[name] for other in rest)
    ]
    if unequal or not calls[0].kind.startswith("all_to_all"):
        return unequal
    # whether each rank sends the tensors that their receivers expect
    sent_rows = [tuple(map(collectives.format_tensor, call.sends)) for call in calls]
    filled_rows = [map(collectives.format_tensor, call.fills) for call in calls]
    return [] if sent_rows == [*zip(*filled_rows, strict=True)] else ["splits"]


def _num_bytes(tensor: torch.Tensor) -> int:
    if tensor.layout is not torch.sparse_coo:
        return tensor.numel() * tensor.element_size()
    return _num_bytes(tensor._indices()) + _num_bytes(tensor._values())


def _format_tensors(tensors: Iterable[torch.Tensor]) -> str:
    return ", ".join(collectives.format_tensor(tensor) for tensor in tensors)


@attrs.frozen(kw_only=True)
class Entry:
    """One completed collective in the log of a run.

    Attributes:
        kind: torch's name of the collective, such as "all_reduce".
        label: accelfn's label of the collective; None for a call outside accelfn.
        step: the number of the update that made the call; None outside a step.
        num_bytes: the largest number of bytes that one rank sent.
        shapes: the shapes and dtypes that all ranks share.
        op: the reduction, such as "SUM", or None.
        root: the one rank that sends or receives, or None.
        ranks: the ranks that took part.
        group: the name of the process group, such as "tp"; empty for the whole world.
        site: the file and line of the user's code on the first rank, or on the sender.
        for_others: for each of `ranks`, the number of its bytes that reach other ranks,
            unchanged or as part of a sum.
    """

    kind: str
    label: str | None
    step: int | None
    num_bytes: int
    shapes: str
    op: str | None
    root: int | None
    ranks: tuple[int, ...]
    site: str
    group: str = ""
    for_others: tuple[int, ...] = ()

    def __str__(self) -> str:
        """Return the collective as one line of text."""
        label = "" if self.label is None else f" {self.label!r}"
        step = "" if self.step is None else f" at update {self.step}"
        call = " ".join(part for part in (self.kind, self.op, self.shapes) if part)
        among = (
            f" among {_listed_ranks(self.ranks)} ({self.group})" if self.group else ""
        )
        return f"{call}{among}, {self.num_bytes} bytes{label}{step} ({self.site})"


def entry_of(calls: Sequence[Call]) -> Entry:
    """Return the log entry for matched calls."""
    first = calls[0]
    in_order = sorted(calls, key=lambda call: call.rank)
    return Entry(
        kind=first.kind,
        label=first.label,
        step=first.step,
        num_bytes=max(call.num_bytes for call in calls),
        shapes=first.shapes,
        op=first.op,
        root=first.root,
        ranks=tuple(call.rank for call in in_order),
        site=first.site,
        group=first.group.name,
        for_others=tuple(call.num_bytes_for_others for call in in_order),
    )


def _listed_ranks(ranks: Sequence[int]) -> str:
    return f"ranks {', '.join(map(str, ranks))}"


# The orders of additions in a reduction over ranks.
#
# The last bits of a float sum depend on the order of additions. A backend uses its fastest
# order, which depends on the number of ranks and on an element's position in a buffer. So a
# test of bitwise equality must pass with every order.


Sums: TypeAlias = Literal["ranks", "ring", "tree"]
Operation: TypeAlias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Parts: TypeAlias = Sequence[torch.Tensor]

_FLOATS = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
_COMPLEX = {torch.complex64, torch.complex128}
_INTEGERS = {torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool}
# for each reduction: its function, and the dtypes that Gloo can reduce
_OPERATIONS: Mapping[str, tuple[Operation, set[torch.dtype]]] = {
    "SUM": (torch.add, _FLOATS | _COMPLEX | _INTEGERS),
    "AVG": (torch.add, _FLOATS | _COMPLEX),
    "PRODUCT": (torch.mul, _FLOATS | _COMPLEX | _INTEGERS),
    "MIN": (torch.minimum, _FLOATS | _INTEGERS),
    "MAX": (torch.maximum, _FLOATS | _INTEGERS),
    "BAND": (torch.bitwise_and, _INTEGERS),
    "BOR": (torch.bitwise_or, _INTEGERS),
    "BXOR": (torch.bitwise_xor, _INTEGERS),
}


def can_carry_out(kind: str, op: str | None, tensor: torch.Tensor) -> bool:
    """Return whether Gloo supports this collective and reduction for the tensor."""
    if tensor.layout is not torch.strided and (kind, op) != ("all_reduce", "SUM"):
        return False
    return op is None or (op in _OPERATIONS and tensor.dtype in _OPERATIONS[op][1])


def reduce_tensors(op: str, parts: Parts, sums: Sums) -> torch.Tensor:
    """Return the reduction (sum, max, ...) of all ranks' tensors."""
    # a sparse tensor cannot be split into the pieces of a ring
    dense = parts[0].layout is torch.strided
    total = (_ORDERS[sums] if dense else reduce)(_OPERATIONS[op][0], parts)
    return total / len(parts) if op == "AVG" else total


def _by_ring(operate: Operation, parts: Parts) -> torch.Tensor:
    """Reduce each piece of the buffer, starting at a different rank, as a ring does."""
    size = len(parts)
    pieces = [part.reshape(-1).tensor_split(size) for part in parts]
    totals = [
        reduce(operate, [pieces[(i + k) % size][i] for k in range(1, size + 1)])
        for i in range(size)
    ]
    return torch.cat(totals).view_as(parts[0])


def _by_pairs(operate: Operation, parts: Parts) -> torch.Tensor:
    """Reduce pairs of neighbors first, then pairs of the results, as a tree does."""
    while len(parts) > 1:
        pairs = zip(parts[::2], parts[1::2], strict=False)
        odd = parts[len(parts) - len(parts) % 2 :]
        parts = [*(operate(one, two) for one, two in pairs), *odd]
    return parts[0]


_ORDERS: Mapping[Sums, Callable[[Operation, Parts], torch.Tensor]] = {
    "ranks": reduce,  # from the first rank to the last
    "ring": _by_ring,
    "tree": _by_pairs,
}


# Faults: planned failures of a simulated world.
#
# A fault happens once, when its `rank` enters a collective. `at` is the index of the
# collective among the calls of this rank, from 0, or a label. With `at` and `step`, the fault
# happens only in that update. With only `step`, the fault happens when that update begins,
# even if the update has no collective; a `Corrupt` then changes the update's first
# collective. Without `at` and `step`, the fault happens at the rank's first collective.


class Unwound(BaseException):
    """Ends a rank at once. `except Exception` does not catch this exception."""

    def __init__(self, how: str, returns: int | None = None) -> None:
        """Initialize with the text for the table, and the update of the rank's return."""
        super().__init__(how)
        self.how = how
        self.returns = returns


class Left(Unwound):
    """The rank leaves the simulation, as if its function had returned."""


class Crashed(Unwound):
    """The rank crashes as if it were killed. It takes part in no further collective."""


class RankFaultError(RuntimeError):
    """The error that a planned `Raise` raises by default."""


def _format_error(value: object) -> str:
    return value.__name__ if isinstance(value, type) else repr(value)


_satisfies = partial(arguments.satisfies, within="testing.")
_is_count = arguments.integer(0, within="testing.")
_is_step = attrs.validators.optional(_is_count)
_is_place = _satisfies(
    lambda at: at is None or isinstance(at, str) or arguments.is_integer(at, 0),
    "the index of one of the rank's collectives, 0 or more, or a label",
)
_is_duration = _satisfies(
    lambda seconds: isinstance(seconds, (int, float)) and seconds >= 0,
    "virtual seconds, 0 or more",
)
_is_error = _satisfies(
    lambda error: issubclass(
        error if isinstance(error, type) else type(error), Exception
    ),
    "an exception or an exception class",
)


@attrs.frozen
class _Planned:
    """The base of all faults: a rank, and the collective or update where the fault happens."""

    rank: int = attrs.field(validator=_is_count)
    at: int | str | None = attrs.field(default=None, validator=_is_place)
    step: int | None = attrs.field(default=None, kw_only=True, validator=_is_step)


@attrs.frozen
class Raise(_Planned):
    """The rank raises an exception.

    Attributes:
        error: the exception, or an exception class, which accelfn calls with a message.
    """

    error: Exception | type[Exception] = attrs.field(
        default=RankFaultError, kw_only=True, validator=_is_error, repr=_format_error
    )


@attrs.frozen
class Leave(_Planned):
    """The rank leaves the run early, as if its function had returned None."""


@attrs.frozen
class Crash(_Planned):
    """The rank stops as if it were killed: no `except Exception` of its function runs.

    Attributes:
        returns: in an elastic run, the number of an update. When another rank has begun this
            update, the function of the crashed rank is called again, as in a new process. With
            None the rank does not come back.
    """

    returns: int | None = attrs.field(default=None, kw_only=True, validator=_is_step)


@attrs.frozen
class Stall(_Planned):
    """The rank is late by virtual seconds. If that exceeds the timeout, the other ranks raise."""

    seconds: float = attrs.field(
        default=float("inf"), kw_only=True, validator=_is_duration
    )


@attrs.frozen
class Corrupt(_Planned):
    """One element that the rank receives is wrong by 1.

    Integers that DistributedDataParallel exchanges are not changed: DDP uses some of them as
    memory offsets without a check, and a wrong offset may end the process.

    Attributes:
        element: the index of the element among all received elements, modulo their number.
    """

    element: int = attrs.field(default=0, kw_only=True, validator=_is_count)


@attrs.frozen
class Terminate(_Planned):
    """The rank receives SIGTERM: its signal handler runs, or the rank ends as if killed.

    Python runs signal handlers only in the main thread, and ranks are other threads. So
    accelfn notifies the rank's `af.stopping` block. Without such a block, the rank calls the
    handler that `signal.getsignal` returns.
    """


Fault: TypeAlias = Raise | Leave | Crash | Stall | Corrupt | Terminate


def is_of_update(fault: Fault) -> bool:
    """Whether a fault happens when an update begins, not at a collective."""
    alone = fault.at is None and fault.step is not None
    return alone and not isinstance(fault, Corrupt)


def strike(fault: Fault, call: Call | None = None) -> None:
    """Apply a fault to the rank, or to the tensors that a call received.

    Raises:
        Unwound: the rank leaves or crashes here.
        Exception: the error of a `Raise`.
    """
    match fault:
        case Raise(error=Exception() as error):
            raise error
        case Raise(error=type() as kind):
            msg = f"planned fault: {fault!r}"
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
        case _:  # a Stall only delays the rank, and the caller adds the delay
            pass


def is_due(fault: Fault, call: Call, *, has_result: bool) -> bool:
    """Whether a fault happens at this call.

    `Corrupt` happens when the call has a result. All other faults happen before the call is
    posted.
    """
    if isinstance(fault, Corrupt) is not has_result or is_of_update(fault):
        return False
    if call.rank != fault.rank or fault.step not in (None, call.step):
        return False
    if has_result and not _is_corruptible(call):
        return False
    if fault.at is None and fault.step is not None:
        return True
    return (fault.at or 0) == (call.label if isinstance(fault.at, str) else call.index)


def _is_corruptible(call: Call) -> bool:
    tensors = [fill for fill in call.fills if fill.numel()]
    if all(tensor.dtype.is_floating_point for tensor in tensors):
        return bool(tensors)
    files = (frame.f_code.co_filename for frame, _ in walk_stack(None))
    return distributed.__file__ not in files


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
    """Change one element, given by its index among all elements of the tensors."""
    number %= sum(tensor.numel() for tensor in tensors)
    for tensor in tensors:
        if number < tensor.numel():
            place = tensor.detach()[
                tuple(map(int, np.unravel_index(number, tensor.shape)))
            ]
            wrong = ~place if place.dtype is torch.bool else place + 1
            if torch.equal(wrong, place) or place.isnan():  # adding 1 changed nothing
                wrong = torch.zeros_like(place)
            place.copy_(wrong)
            return
        number -= tensor.numel()
