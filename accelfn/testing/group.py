# SPDX-License-Identifier: Apache-2.0
"""A torch process group in memory, so that torch's own code runs on it unchanged.

It takes what `torch.distributed` and DistributedDataParallel call with an explicit group.
What a rank gives is copied when it calls; what it gets is written when it waits, and holds
NaN until then; results of ranks never share memory.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Work

from accelfn.errors import ArgumentError, DefaultGroupError
from accelfn.testing.calls import Call, site
from accelfn.testing.exchange import Exchange, Meeting
from accelfn.testing.operations import is_reduction
from accelfn.world import Connection

Tensors: TypeAlias = torch.Tensor | Sequence[torch.Tensor]


class SimulatedWork(Work):
    """What a collective returns: the result is written when it is waited for."""

    def __init__(
        self,
        exchange: Exchange,
        posted: Sequence[tuple[Call, Meeting]],
        returned: Sequence[torch.Tensor],
    ) -> None:
        """Take the calls that this is the work of, and what a future of it holds."""
        super().__init__()
        self._exchange = exchange
        self._posted = list(posted)
        self._returned = list(returned)

    def wait(self, timeout: object = None) -> bool:
        """Let other ranks run until the result is there, and write it."""
        del timeout  # the world's, in virtual time
        while self._posted:
            call, meeting = self._posted.pop(0)
            parts = self._exchange.wait(call.rank, meeting, call)
            with torch.no_grad():
                for target, part in zip(call.fills, parts, strict=True):
                    target.detach().copy_(part)
            self._exchange.touch(call)
        return True

    def get_future(self) -> "torch.futures.Future[Any]":
        """Return a future that is done: C++ waits for it where no turn could pass."""
        self.wait()
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._returned)
        return future

    def is_completed(self) -> bool:
        """Whether the result was waited for."""
        return not self._posted

    def result(self) -> list[torch.Tensor]:
        """Return the tensors that were written."""
        self.wait()
        return self._returned

    def _source_rank(self) -> int:
        """Return who sent what `recv` from any rank received."""
        return self._from

    def remember_source(self, meeting: Meeting, rank: int) -> None:
        """Note where to look for the sender."""
        self._pair = (meeting, rank)

    @property
    def _from(self) -> int:
        meeting, rank = self._pair
        return next(peer for peer in meeting.calls if peer != rank)


class SimulatedGroup(dist.ProcessGroup):
    """One rank's process group of a simulated world."""

    def __init__(self, rank: int, exchange: Exchange) -> None:
        """Take the rank, and where the calls of all ranks meet."""
        super().__init__(rank, exchange.size)
        self._rank = rank
        self._exchange = exchange
        self.connection: Connection | None = None

    def getBackendName(self) -> str:  # noqa: N802 - torch's name for it
        """Return the name that torch prints."""
        return "simulated"

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Work:
        """Reduce each tensor over all ranks, in place."""
        op = _op(opts)
        calls = [
            self._call("all_reduce", [each], [each], op=op) for each in _list(tensors)
        ]
        return self._post(calls, _list(tensors))

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Work:
        """Reduce several tensors."""
        return self.allreduce(tensors, opts)

    def broadcast(self, tensors: Tensors, opts: Any = None, **given: Any) -> Work:
        """Send the root's tensor to all."""
        root = given["root"] if "root" in given else _root(opts)
        calls = [
            self._call("broadcast", [each], [each], root=root)
            for each in _list(tensors)
        ]
        return self._post(calls, _list(tensors))

    def reduce(self, tensors: Tensors, opts: Any = None) -> Work:
        """Reduce to the root, and leave the others' tensors as they are."""
        root = _root(opts)
        given = _list(tensors)
        call = self._call(
            *("reduce", given, given if root == self._rank else []),
            op=_op(opts),
            root=root,
        )
        return self._post([call], given)

    def allgather(self, outputs: Any, inputs: Tensors, opts: Any = None) -> Work:
        """Gather every rank's tensor, into a list."""
        lists = [outputs] if isinstance(outputs[0], torch.Tensor) else list(outputs)
        calls = [
            self._call("all_gather", [given], self._each(got))
            for given, got in zip(_list(inputs), lists, strict=True)
        ]
        return self._post(calls, [each for got in lists for each in got])

    def allgather_coalesced(
        self, outputs: Any, inputs: Tensors, opts: Any = None
    ) -> Work:
        """Gather several tensors; outputs are a list of tensors a rank."""
        return self.allgather(list(zip(*outputs, strict=True)), inputs)

    def _allgather_base(
        self, output: torch.Tensor, given: torch.Tensor, opts: Any = None
    ) -> Work:
        """Gather every rank's tensor, one after the other in one."""
        return self.allgather_into_tensor_coalesced([output], [given])

    all_gather_single = _allgather_base

    def allgather_into_tensor_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Work:
        """Gather several tensors, each into one."""
        kind = "all_gather_into_tensor"
        calls = [
            self._call(kind, [given], self._chunks(got, given))
            for got, given in zip(_list(outputs), _list(inputs), strict=True)
        ]
        return self._post(calls, _list(outputs))

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def gather(self, outputs: Any, inputs: Tensors, opts: Any = None) -> Work:
        """Gather every rank's tensor at the root."""
        got = self._each(outputs[0]) if outputs else []
        call = self._call("gather", _list(inputs), got, root=_root(opts))
        return self._post([call], got)

    def scatter(self, outputs: Tensors, inputs: Any, opts: Any = None) -> Work:
        """Give each rank one of the root's tensors."""
        given = self._each(inputs[0]) if inputs else []
        call = self._call("scatter", given, _list(outputs), root=_root(opts))
        return self._post([call], _list(outputs))

    def reduce_scatter(self, outputs: Tensors, inputs: Any, opts: Any = None) -> Work:
        """Reduce a list of tensors, of which each rank gets its own."""
        op = _op(opts)
        calls = [
            self._call("reduce_scatter", self._each(given), [got], op=op)
            for got, given in zip(_list(outputs), inputs, strict=True)
        ]
        return self._post(calls, _list(outputs))

    def _reduce_scatter_base(
        self, output: torch.Tensor, given: torch.Tensor, opts: Any = None
    ) -> Work:
        """Reduce one tensor, of which each rank gets its part."""
        return self.reduce_scatter_tensor_coalesced([output], [given], opts)

    reduce_scatter_single = _reduce_scatter_base

    def reduce_scatter_tensor_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Work:
        """Reduce several tensors, of each of which a rank gets its part."""
        op = _op(opts)
        kind = "reduce_scatter_tensor"
        calls = [
            self._call(kind, self._chunks(given, got), [got], op=op)
            for got, given in zip(_list(outputs), _list(inputs), strict=True)
        ]
        return self._post(calls, _list(outputs))

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        """Give each rank its tensor of a list."""
        got = self._each(outputs)
        call = self._call("all_to_all", self._each(inputs), got)
        return self._post([call], got)

    def alltoall_base(
        self,
        output: torch.Tensor,
        given: torch.Tensor,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        opts: Any = None,
    ) -> Work:
        """Give each rank its rows of a tensor."""
        call = self._call(
            "all_to_all_single",
            self._rows(given, input_splits),
            self._rows(output, output_splits),
        )
        return self._post([call], [output])

    all_to_all_single = alltoall_base

    def send(self, tensors: Tensors, peer: int, tag: int = 0) -> Work:
        """Give tensors to one rank, which must receive them."""
        calls = [
            self._call("send", [each], [], peer=peer, tag=tag)
            for each in _list(tensors)
        ]
        return self._post(calls, _list(tensors))

    def recv(self, tensors: Tensors, peer: int | None, tag: int = 0) -> Work:
        """Take tensors from one rank."""
        calls = [
            self._call("recv", [], [each], peer=peer, tag=tag)
            for each in _list(tensors)
        ]
        return self._post(calls, _list(tensors))

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Work:
        """Take tensors from whoever sends first."""
        return self.recv(tensors, None, tag)

    def barrier(self, opts: Any = None) -> Work:
        """Wait for all ranks."""
        return self._post([self._call("barrier", [], [])], [])

    def _call(
        self,
        kind: str,
        given: Sequence[torch.Tensor],
        got: Sequence[torch.Tensor],
        *,
        op: str | None = None,
        root: int | None = None,
        peer: int | None = None,
        tag: int = 0,
    ) -> Call:
        connection = self.connection
        if op is not None and not is_reduction(op):
            msg = f"{kind}: a simulated world has no reduction {op}."
            raise ArgumentError(msg)
        return Call(
            rank=self._rank,
            kind=kind,
            sends=tuple(each.detach().clone() for each in given),
            fills=tuple(got),
            op=op,
            root=root,
            peer=peer,
            tag=tag,
            label=None if connection is None else connection.label,
            step=None if connection is None else connection.step,
            site=site(),
        )

    def _post(
        self, calls: Sequence[Call], returned: Sequence[torch.Tensor]
    ) -> SimulatedWork:
        posted = [(call, self._exchange.post(call)) for call in calls]
        with torch.no_grad():
            for call, _ in posted:
                for target in call.fills:
                    _poison(target.detach())
        return SimulatedWork(self._exchange, posted, returned)

    def _each(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return a list of one tensor a rank."""
        found = list(tensors)
        if len(found) != self._exchange.size:
            msg = (
                f"Expected {self._exchange.size} tensors, one a rank, got {len(found)}."
            )
            raise ArgumentError(msg)
        return found

    def _chunks(self, whole: torch.Tensor, part: torch.Tensor) -> list[torch.Tensor]:
        """Return views of one tensor as one part a rank, each of the part's shape."""
        size = self._exchange.size
        if whole.numel() != size * part.numel() or not whole.is_contiguous():
            msg = (
                f"Expected a contiguous tensor of {size} times the elements of"
                f" {tuple(part.shape)}, got {tuple(whole.shape)}."
            )
            raise ArgumentError(msg)
        flat = whole.detach().view(size, *part.shape)
        return [flat[rank] for rank in range(size)]

    def _rows(
        self, whole: torch.Tensor, splits: Sequence[int] | None
    ) -> list[torch.Tensor]:
        """Return views of a tensor's rows, those of each rank."""
        size = self._exchange.size
        if not splits:
            if whole.shape[0] % size:
                msg = f"{whole.shape[0]} rows do not divide evenly among {size} ranks."
                raise ArgumentError(msg)
            splits = [whole.shape[0] // size] * size
        return self._each(whole.detach().split(list(splits)))


def _refuse(self: "DefaultGroup", *args: object, **named: object) -> Any:
    del args, named
    msg = (
        f"Rank {self.rank()} of a simulated world called a collective of torch's default"
        " process group, which a simulated world has not: pass group=world.group."
    )
    raise DefaultGroupError(msg)


class DefaultGroup(dist.ProcessGroup):
    """What torch's default group is in a simulated rank: it tells the rank, no more.

    Without one, code that asks `is_initialized()` would take itself for alone.
    """

    def __init__(self, rank: int, size: int) -> None:
        """Take the place of the rank."""
        super().__init__(rank, size)

    def getBackendName(self) -> str:  # noqa: N802 - torch's name for it
        """Return the name that torch prints."""
        return "simulated default"


_COLLECTIVES = [
    name
    for name, value in vars(SimulatedGroup).items()
    if callable(value)
    and not name.startswith("__")
    and hasattr(dist.ProcessGroup, name)
]
for _name in _COLLECTIVES:
    setattr(DefaultGroup, _name, _refuse)


def _list(tensors: Tensors) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _op(opts: Any) -> str:
    """Return the name of a reduction, out of torch's options or as given."""
    given = getattr(opts, "reduceOp", opts)
    if given is None:
        return "SUM"
    kind = getattr(given, "op", given)
    name = getattr(kind, "name", None) or str(kind).rpartition(".")[-1]
    return cast("str", name).upper()


def _root(opts: Any) -> int:
    return int(getattr(opts, "rootRank", 0))


def _poison(tensor: torch.Tensor) -> None:
    """Fill with what cannot pass for a result: NaN, or the least integer."""
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        tensor.fill_(float("nan"))
    elif tensor.dtype is not torch.bool:
        tensor.fill_(torch.iinfo(tensor.dtype).min)
