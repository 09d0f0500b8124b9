# SPDX-License-Identifier: Apache-2.0
"""A call: what one rank posts when it enters a collective, and how calls of ranks compare."""

import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import attrs
import torch
from torch.nn.parallel import distributed

from accelfn.collectives.failures import format_tensor
from accelfn.errors import ArgumentError
from accelfn.loop.run import deliver

if TYPE_CHECKING:
    from types import FrameType

# `Members`: which ranks of a simulated world make a group, and under which name.


@attrs.frozen(cache_hash=True)
class Members:
    """Ranks whose calls meet one another alone.

    Attributes:
        name: of the group, as "tp"; empty where it is the world's own.
        ranks: of the run, in ascending order, which is the group's.
        generation: which of the worlds that an elastic run has had they are of.
    """

    name: str
    ranks: tuple[int, ...]
    generation: int = 0

    def place_of(self, rank: int) -> int:
        """Return which of the group's ranks a rank of the world is."""
        return self.ranks.index(rank)

    def __str__(self) -> str:
        """Say who they are, where they are not all."""
        if not self.name:
            return ""
        listed = ", ".join(map(str, self.ranks))
        return f"{self.name} of ranks {listed}"


@attrs.define(kw_only=True, eq=False)
class Call:
    """One rank's part in a collective.

    Attributes:
        rank: who called.
        index: how many collectives this rank called before.
        kind: torch's name of it, as "all_reduce".
        sends: copies of what this rank gives.
        fills: the tensors that the result is written to.
        op: the reduction, or None.
        root: the one rank that sends or receives, or None.
        peer: the other rank of a send or recv; None for any.
        tag: that of a send or recv.
        label: what the ranks are doing, as accelfn's collectives say.
        structure: the containers of the tree that the call is for, as those say.
        step: the update at which a state's step called, where one did.
        site: file and line of the user's code.
        at: the rank's virtual time in seconds.
        group: the ranks among which it is made.
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
        """Whether it is one rank's to another, and not of all."""
        return self.kind in ("send", "recv")

    @property
    def num_bytes(self) -> int:
        """How much this rank gives."""
        return sum(_num_bytes(each) for each in self.sends)

    @property
    def num_bytes_for_others(self) -> int:
        """How much of it others are to have, as it is or in a sum."""
        is_root = self.rank == self.root
        if self.kind in _FROM_ROOT and not is_root:
            return 0
        if self.kind == "gather" and is_root:
            return 0
        if self.kind in _PART_FOR_EACH:
            mine = self.group.place_of(self.rank)
            return sum(
                _num_bytes(part) for i, part in enumerate(self.sends) if i != mine
            )
        return self.num_bytes

    @property
    def shapes(self) -> str:
        """Shapes and dtypes: of what ranks have in common, or of all that this one has."""
        if not self.kind.startswith("all_to_all"):
            return _format_tensors(self._common())
        return (
            f"gives {_format_tensors(self.sends)}, takes {_format_tensors(self.fills)}"
        )

    def agreed(self) -> tuple[Any, ...]:
        """Return what must be the same on all ranks, in the order of `AGREED`."""
        common = [(each.shape, each.dtype, each.layout) for each in self._common()]
        return self.kind, self.op, self.root, common, self.structure, self.label

    def row(self) -> tuple[str, ...]:
        """Return what a table shows of it."""
        root = None if self.root is None else f"root {self.root}"
        peer = {"send": "to", "recv": "from"}.get(self.kind)
        if peer is not None:
            peer = f"{peer} {'any rank' if self.peer is None else f'rank {self.peer}'}"
        tag = f"tag {self.tag}" if self.tag else None
        tree = None if self.structure == "*" else self.structure
        among = f"among {self.group}" if self.group.name else None
        said = (self.op, root, peer, tag, self.shapes, tree, among)
        return (
            f"#{self.index} {self.kind}",
            " ".join(each for each in said if each),
            "" if self.label is None else repr(self.label),
            "" if self.step is None else f"update {self.step}",
            self.site,
        )

    def _common(self) -> tuple[torch.Tensor, ...]:
        if self.kind.startswith("all_to_all"):  # compared pair by pair
            return ()
        return self.sends if self.kind in _ONE_SENT else self.fills


AGREED = ("kind", "reduction", "root", "shape or dtype", "structure", "label")
_FROM_ROOT = frozenset({"broadcast", "scatter"})
_PART_FOR_EACH = frozenset({"scatter", "all_to_all", "all_to_all_single"})
_ONE_SENT = frozenset(
    {
        *("all_reduce", "broadcast", "reduce", "send"),
        *("all_gather", "all_gather_single", "gather"),
    }
)


def differing(calls: Sequence[Call]) -> list[str]:
    """Return the names of what must be the same in calls that met, and is not."""
    first, *others = [call.agreed() for call in calls]
    if calls[0].is_message:
        return [] if all(each[3] == first[3] for each in others) else ["shape or dtype"]
    found = [
        name
        for i, name in enumerate(AGREED)
        if any(each[i] != first[i] for each in others)
    ]
    return found or _unequal_splits(calls)


def _unequal_splits(calls: Sequence[Call]) -> list[str]:
    """Compare what each rank of an all_to_all gives to what each takes."""
    if not calls[0].kind.startswith("all_to_all"):
        return []
    ranks = range(len(calls))
    same = all(
        format_tensor(calls[i].sends[j]) == format_tensor(calls[j].fills[i])
        for i in ranks
        for j in ranks
    )
    return [] if same else ["splits"]


def _num_bytes(tensor: torch.Tensor) -> int:
    if tensor.layout is not torch.sparse_coo:
        return tensor.numel() * tensor.element_size()
    return _num_bytes(tensor._indices()) + _num_bytes(tensor._values())


def _format_tensors(tensors: Iterable[torch.Tensor]) -> str:
    return ", ".join(format_tensor(each) for each in tensors)


# `Entry`: a collective that simulated ranks have made, as the log of a run keeps it.


@attrs.frozen(kw_only=True)
class Entry:
    """One collective that was carried out, as the log keeps it.

    Attributes:
        kind: torch's name of it, as "all_reduce".
        label: what the ranks were doing, where accelfn's own collectives say it.
        step: the update at which it happened, where a state's step called it.
        num_bytes: how much one rank gave, the most of all ranks.
        shapes: of what the ranks have in common, with dtypes.
        op: the reduction, or None.
        root: the one rank that sends or receives, or None.
        ranks: who took part.
        group: the name of their group, as "tp"; empty where it is the world's own.
        site: file and line of the user's code, of the first of them, or of a sender.
        for_others: by rank, in the order of `ranks`, how many bytes of what it gave are for
            others to have, be it as they are or in a sum.
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
        """Show it on a line."""
        label = "" if self.label is None else f" {self.label!r}"
        step = "" if self.step is None else f" at update {self.step}"
        what = " ".join(each for each in (self.kind, self.op, self.shapes) if each)
        among = (
            f" among {_listed_ranks(self.ranks)} ({self.group})" if self.group else ""
        )
        return f"{what}{among}, {self.num_bytes} bytes{label}{step} ({self.site})"


def entry_of(calls: Sequence[Call]) -> Entry:
    """Return the entry of calls that met."""
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


# The orders in which ranks' tensors are added up: a sum of floats depends on it.
#
# A backend takes the order that is fastest, and the same in each run; which one that is
# depends on the number of ranks and on where in a buffer a number lies. What is to be the
# same bitwise may depend on none of it.


Sums: TypeAlias = Literal["ranks", "ring", "tree"]
Operation: TypeAlias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Parts: TypeAlias = Sequence[torch.Tensor]

_OPERATIONS: Mapping[str, Operation] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


def reduce_tensors(op: str, parts: Parts, sums: Sums) -> torch.Tensor:
    """Return what all ranks' tensors are together; it is the same on all of them."""
    # nothing is cut out of a sparse tensor, and it has no place in a buffer
    dense = parts[0].layout is torch.strided
    total = (_ORDERS[sums] if dense else _by_rank)(_OPERATIONS[op], parts)
    return total / len(parts) if op == "AVG" else total


def _by_rank(operate: Operation, parts: Parts) -> torch.Tensor:
    """From the first rank to the last."""
    total = parts[0]
    for part in parts[1:]:
        total = operate(total, part)
    return total


def _by_ring(operate: Operation, parts: Parts) -> torch.Tensor:
    """Each piece of the buffer from another rank on, as a ring passes pieces round."""
    size = len(parts)
    pieces = [each.reshape(-1).tensor_split(size) for each in parts]
    passed = [
        _by_rank(operate, [pieces[(i + k) % size][i] for k in range(1, size + 1)])
        for i in range(size)
    ]
    return torch.cat(passed).view_as(parts[0])


def _by_pairs(operate: Operation, parts: Parts) -> torch.Tensor:
    """Neighbours first, and then their sums, as a tree does."""
    while len(parts) > 1:
        pairs = zip(parts[::2], parts[1::2], strict=False)
        odd = parts[len(parts) - len(parts) % 2 :]
        parts = [*(operate(one, two) for one, two in pairs), *odd]
    return parts[0]


_ORDERS: Mapping[Sums, Callable[[Operation, Parts], torch.Tensor]] = {
    "ranks": _by_rank,
    "ring": _by_ring,
    "tree": _by_pairs,
}


# Faults: what goes wrong in a simulated world, planned by rank, place and update.
#
# A fault is a record. It happens once, as its `rank` enters a collective: the one that `at`
# names by its index among the rank's own, from 0, or the first that has the label `at`; and
# if `step` is given, only at that update of the state. With `step` alone it happens as that
# update begins, be there a collective in it or not; what is received then is that of its
# first. Without either it happens at the first collective.


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


def _format_error(value: object) -> str:
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
        default=RankFaultError, kw_only=True, validator=_is_error, repr=_format_error
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
