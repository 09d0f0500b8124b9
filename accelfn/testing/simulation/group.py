# SPDX-License-Identifier: Apache-2.0
"""A torch process group in memory, so that torch's own code runs on it unchanged.

It has the methods by which `torch.distributed` and DistributedDataParallel of torch 2.13 to
2.15 call a group, and makes of each what all have in common: calls, with copies of what the
rank gives, and a work that fills what it gets.
"""

from collections.abc import Callable, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import Work

from accelfn.collectives.calls import shown, site
from accelfn.errors import ArgumentError, SimulationError
from accelfn.testing.simulation.calls import Call
from accelfn.testing.simulation.members import Members
from accelfn.testing.simulation.operations import can_carry_out
from accelfn.world.activity import Activity

if TYPE_CHECKING:
    from accelfn.testing.simulation.entries import Entry

# torch's stubs name the same parameter differently from method to method
# pyright: reportIncompatibleMethodOverride=false, reportPrivateUsage=false

Tensors: TypeAlias = torch.Tensor | Sequence[torch.Tensor]
Post: TypeAlias = Callable[[Sequence[Call], Sequence[torch.Tensor]], Work]
"""Posts calls; the tensors are what a future of the work holds."""
_names = count()


class SimulatedGroup(dist.ProcessGroup):
    """One rank's process group of a simulated world.

    Attributes:
        log: what was carried out so far, by all ranks.
        activity: what the rank is doing.
        members: the ranks of the group.
    """

    def __init__(
        self,
        rank: int,
        members: Members,
        post: Post,
        log: "Sequence[Entry]" = (),
        activity: Activity | None = None,
    ) -> None:
        """Take a rank of the world, who it talks to, what posts, and what will come of it."""
        size = len(members.ranks)
        super().__init__(members.place_of(rank), size)  # pyright: ignore[reportCallIssue] - no store needed
        self._rank = rank
        self._size = size
        self._post = post
        self._name: Any = None  # torch has a type of its own for it
        self.members = members
        self.log = log
        self.activity = Activity() if activity is None else activity

    @property
    def rank_of_run(self) -> int:
        """This rank among all of the run."""
        return self._rank

    def getBackendName(self) -> str:  # noqa: N802 - torch's name for it
        """Return the name that torch prints."""
        return "simulated"

    def _get_backend(self, device: torch.device) -> "SimulatedGroup":
        """Return what torch asks for whether it can coalesce: this group, for any device."""
        return self

    @property
    def supports_coalescing(self) -> bool:
        """Whether calls are to be held and posted as one: no, each is a call of its own."""
        return False

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Work:
        """Reduce each tensor over all ranks, in place."""
        given, op = _list(tensors), _op(opts)
        calls = [self._call("all_reduce", [each], [each], op=op) for each in given]
        return self._post(calls, given)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Work:
        """Reduce several tensors."""
        return self.allreduce(tensors, opts)

    def broadcast(self, tensors: Tensors, opts: Any = None) -> Work:
        """Send the root's tensor to all."""
        given, root = _list(tensors), _root(opts)
        calls = [self._call("broadcast", [each], [each], root=root) for each in given]
        return self._post(calls, given)

    def reduce(self, tensors: Tensors, opts: Any = None) -> Work:
        """Reduce to the root, and leave the others' tensors as they are."""
        given, root = _list(tensors), _root(opts)
        got = given if root == self.rank() else []
        call = self._call("reduce", given, got, op=_op(opts), root=root)
        return self._post([call], given)

    def allgather(self, outputs: Any, inputs: Tensors, opts: Any = None) -> Work:
        """Gather every rank's tensor, into a list."""
        lists = [outputs] if isinstance(outputs[0], torch.Tensor) else list(outputs)
        calls = [
            self._call("all_gather", [given], self._alike(got, given))
            for given, got in zip(_list(inputs), lists, strict=True)
        ]
        return self._post(calls, [each for got in lists for each in got])

    def allgather_coalesced(
        self, outputs: Any, inputs: Tensors, opts: Any = None
    ) -> Work:
        """Gather several tensors; outputs are a list of tensors a rank."""
        return self.allgather(list(zip(*outputs, strict=True)), inputs)

    def all_gather_single(
        self, output: torch.Tensor, given: torch.Tensor, opts: Any = None
    ) -> Work:
        """Gather every rank's tensor, one after the other in one."""
        return self.all_gather_single_coalesced([output], [given])

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Work:
        """Gather several tensors, each into one."""
        calls = [
            self._call("all_gather_single", [given], self._parts(got, given))
            for got, given in zip(_list(outputs), _list(inputs), strict=True)
        ]
        return self._post(calls, _list(outputs))

    def gather(self, outputs: Any, inputs: Tensors, opts: Any = None) -> Work:
        """Gather every rank's tensor at the root."""
        given = _list(inputs)
        got = self._alike(outputs[0], given[0]) if outputs else []
        call = self._call("gather", given, got, root=_root(opts))
        return self._post([call], got)

    def scatter(self, outputs: Tensors, inputs: Any, opts: Any = None) -> Work:
        """Give each rank one of the root's tensors."""
        got = _list(outputs)
        given = self._alike(inputs[0], got[0]) if inputs else []
        call = self._call("scatter", given, got, root=_root(opts))
        return self._post([call], got)

    def reduce_scatter(self, outputs: Tensors, inputs: Any, opts: Any = None) -> Work:
        """Reduce a list of tensors, of which each rank gets its own."""
        op = _op(opts)
        calls = [
            self._call("reduce_scatter", self._alike(given, got), [got], op=op)
            for got, given in zip(_list(outputs), inputs, strict=True)
        ]
        return self._post(calls, _list(outputs))

    def reduce_scatter_single(
        self, output: torch.Tensor, given: torch.Tensor, opts: Any = None
    ) -> Work:
        """Reduce one tensor, of which each rank gets its part."""
        return self.reduce_scatter_single_coalesced([output], [given], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Work:
        """Reduce several tensors, of each of which a rank gets its part."""
        kind, op = "reduce_scatter_single", _op(opts)
        calls = [
            self._call(kind, self._parts(given, got), [got], op=op)
            for got, given in zip(_list(outputs), _list(inputs), strict=True)
        ]
        return self._post(calls, _list(outputs))

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        """Give each rank its tensor of a list."""
        got = self._each(outputs)
        call = self._call("all_to_all", self._each(inputs), got)
        return self._post([call], got)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        given: torch.Tensor,
        output_splits: Sequence[int] = (),
        input_splits: Sequence[int] = (),
        opts: Any = None,
    ) -> Work:
        """Give each rank its rows of a tensor."""
        call = self._call(
            "all_to_all_single",
            self._rows(given, input_splits),
            self._rows(output, output_splits),
        )
        return self._post([call], [output])

    def send(self, tensors: Tensors, peer: int, tag: int = 0) -> Work:
        """Give tensors to one rank, which must receive them."""
        given = _list(tensors)
        calls = [self._call("send", [each], [], peer=peer, tag=tag) for each in given]
        return self._post(calls, given)

    def recv(self, tensors: Tensors, peer: int | None, tag: int = 0) -> Work:
        """Take tensors from one rank."""
        got = _list(tensors)
        calls = [self._call("recv", [], [each], peer=peer, tag=tag) for each in got]
        return self._post(calls, got)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Work:
        """Take tensors from whoever sends first."""
        return self.recv(tensors, None, tag)

    def barrier(self, opts: Any = None) -> Work:
        """Wait for all ranks."""
        return self._post([self._call("barrier", [], [])], [])

    def among(self, members: Members, activity: Activity) -> "SimulatedGroup":
        """Return this rank's group of other members, whose calls meet one another alone."""
        return SimulatedGroup(self._rank, members, self._post, self.log, activity)

    @property
    def group_name(self) -> str:
        """The name by which torch's functional collectives find it, in a list of the process."""
        if self._name is None:
            self._name = f"simulated {next(_names)}, rank {self._rank}"
            c10d._register_process_group(self._name, self)
        return self._name

    def forget(self) -> bool:
        """Take it off the process's list, which would keep it alive; say if it was there."""
        if self._name is None:
            return False
        c10d._unregister_process_group(self._name)
        self._name = None
        return True

    def new_group(self, *args: object, **named: object) -> NoReturn:
        """Refuse groups that not all ranks know of."""
        msg = (
            f"Rank {self._rank} of {self._size}: a simulated world has no other groups than"
            " those of its axes and parts. Take world.split(size=...), or name axes,"
            " simulate(size, fn, axes={...}), and take world.along(name); a DeviceMesh is"
            " world.mesh."
        )
        raise SimulationError(msg)

    def shutdown(self) -> NoReturn:
        """Refuse to be destroyed."""
        msg = (
            f"Rank {self._rank} of {self._size}: the process group of a simulated world"
            " was to be destroyed. Leave it: it ends with the world."
        )
        raise SimulationError(msg)

    abort = shutdown

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
        for name, rank in (("root", root), ("peer", peer)):
            if rank is not None and not 0 <= rank < self._size:
                msg = f"{kind}: {name} {rank} is none of the {self._size} ranks."
                raise ArgumentError(msg)
        for each in given:
            if not can_carry_out(kind, op, each):
                what = kind if op is None else f"{op} in {kind}"
                msg = f"Gloo has no {what} of a tensor such as {shown(each)}."
                raise ArgumentError(msg)
        return Call(
            rank=self._rank,
            kind=kind,
            group=self.members,
            sends=tuple(each.detach().clone() for each in given),
            fills=tuple(got),
            op=op,
            root=None if root is None else self.members.ranks[root],
            peer=None if peer is None else self.members.ranks[peer],
            tag=tag,
            label=self.activity.label,
            structure=self.activity.structure,
            step=self.activity.step,
            site=site(),
        )

    def _each(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return a list of one tensor a rank."""
        if len(tensors) != self._size:
            msg = f"Expected {self._size} tensors, one a rank, got {len(tensors)}."
            raise ArgumentError(msg)
        return list(tensors)

    def _alike(
        self, tensors: Sequence[torch.Tensor], like: torch.Tensor
    ) -> list[torch.Tensor]:
        """Return a list of one tensor a rank, each like the one that ranks exchange."""
        for rank, each in enumerate(tensors):
            if each.shape != like.shape or each.dtype is not like.dtype:
                msg = (
                    f"The tensor for rank {rank} is {shown(each)}; expected"
                    f" {shown(like)}."
                )
                raise ArgumentError(msg)
        return self._each(tensors)

    def _parts(self, whole: torch.Tensor, like: torch.Tensor) -> list[torch.Tensor]:
        """Return views of one tensor as one part a rank, each like another tensor."""
        fits = whole.numel() == self._size * like.numel() and whole.dtype is like.dtype
        if not fits or not whole.is_contiguous():
            msg = (
                f"Expected a contiguous tensor of {self._size} times the elements of"
                f" {shown(like)}, got {shown(whole)} of strides {whole.stride()}."
            )
            raise ArgumentError(msg)
        return list(whole.detach().view(self._size, *like.shape))

    def _rows(self, whole: torch.Tensor, splits: Sequence[int]) -> list[torch.Tensor]:
        """Return views of a tensor's rows, those of each rank."""
        num_rows = whole.shape[0]
        if not splits:
            if num_rows % self._size:
                msg = f"{num_rows} rows do not divide evenly among {self._size} ranks."
                raise ArgumentError(msg)
            splits = [num_rows // self._size] * self._size
        return self._each(whole.detach().split(list(splits)))


def _list(tensors: Tensors) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _op(opts: Any) -> str:
    """Return the name of a reduction, out of torch's options or as given."""
    given = getattr(opts, "reduceOp", opts)
    if given is None:
        return "SUM"
    name: str = getattr(given, "op", given).name  # a ReduceOp wraps its kind
    return name


def _root(opts: Any) -> int:
    """Return the root, out of torch's options or as given."""
    return opts if isinstance(opts, int) else getattr(opts, "rootRank", 0)
