# SPDX-License-Identifier: Apache-2.0
"""A torch process group in memory, so that torch's distributed code runs without changes.

The group has the methods that `torch.distributed` and DistributedDataParallel of torch 2.13 to
2.15 call. Each method posts calls with copies of the rank's tensors, and returns a work object
that writes the results.
"""

import os
import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from itertools import chain, count
from pathlib import Path
from traceback import walk_tb
from types import SimpleNamespace
from typing import Any, Literal, NoReturn, TypeAlias, cast

import attrs
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import Work
from torch.distributed import device_mesh

from accelfn.errors import ArgumentError, DefaultGroupError, Error, SimulationError
from accelfn.plug import collectives, connection
from accelfn.testing.simulation.calls import Call, Entry, Members, can_carry_out

# pyright: reportIncompatibleMethodOverride=false, reportPrivateUsage=false
# torch's type stubs use different names for the same parameter in different methods

Tensors: TypeAlias = torch.Tensor | Sequence[torch.Tensor]
Post: TypeAlias = Callable[[Sequence[Call], Sequence[torch.Tensor]], Work]
"""A function that posts calls. The future of the work object has the tensors as its value."""
_names = count()


class SimulatedGroup(dist.ProcessGroup):
    """The process group of one rank in a simulated world.

    Attributes:
        log: the collectives that all ranks have completed so far.
        activity: the rank's current update and collective label.
        members: the ranks of the group.
        rank_of_run: this rank's number in the run, not in the group.
    """

    def __init__(
        self,
        rank: int,
        members: Members,
        post: Post,
        log: Sequence[Entry] = (),
        activity: connection.Activity | None = None,
    ) -> None:
        """Initialize for a rank of the run, with its group, `post` function, and log."""
        size = len(members.ranks)
        super().__init__(members.ranks.index(rank), size)  # pyright: ignore[reportCallIssue] - no store needed
        self.rank_of_run = rank
        self._size = size
        self._post = post
        self._name: Any = None  # Any, because torch declares a private type
        self.members = members
        self.log = log
        self.activity = connection.Activity() if activity is None else activity

    def getBackendName(self) -> str:  # noqa: N802 - torch calls this name
        """Return the backend's name that torch prints."""
        return "simulated"

    def _get_backend(self, device: torch.device) -> "SimulatedGroup":
        """Return the backend for a device, which is this group for all devices."""
        return self

    @property
    def supports_coalescing(self) -> bool:
        """Whether torch may post several calls as one. Simulated groups do not support this."""
        return False

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Work:
        """Reduce each tensor over all ranks, in place."""
        return self._in_place("all_reduce", tensors, op=_op(opts))

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: Tensors, opts: Any = None) -> Work:
        """Send the root's tensor to all ranks."""
        return self._in_place("broadcast", tensors, root=_root(opts))

    def reduce(self, tensors: Tensors, opts: Any = None) -> Work:
        """Reduce to the root. The tensors of other ranks do not change."""
        sends, root = _list(tensors), _root(opts)
        fills = sends if root == self.rank() else []
        return self._start("reduce", [(sends, fills)], sends, op=_op(opts), root=root)

    def allgather(self, outputs: Any, inputs: Tensors, opts: Any = None) -> Work:
        """Gather every rank's tensor into a list."""
        lists = [outputs] if isinstance(outputs[0], torch.Tensor) else list(outputs)
        calls = [
            ([send], self._per_rank_like(fills, send))
            for send, fills in zip(_list(inputs), lists, strict=True)
        ]
        return self._start("all_gather", calls, [*chain.from_iterable(lists)])

    def allgather_coalesced(
        self, outputs: Any, inputs: Tensors, opts: Any = None
    ) -> Work:
        """Gather several tensors from every rank. Each output list has one rank's tensors."""
        return self.allgather(list(zip(*outputs, strict=True)), inputs)

    def all_gather_single(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Work:
        """Gather every rank's tensor into one tensor in rank order, once or several times."""
        fills = _list(outputs)
        calls = [
            ([send], self._parts(fill, send))
            for fill, send in zip(fills, _list(inputs), strict=True)
        ]
        return self._start("all_gather_single", calls, fills)

    def gather(self, outputs: Any, inputs: Tensors, opts: Any = None) -> Work:
        """Gather every rank's tensor on the root."""
        sends = _list(inputs)
        fills = self._per_rank_like(outputs[0], sends[0]) if outputs else []
        return self._start("gather", [(sends, fills)], fills, root=_root(opts))

    def scatter(self, outputs: Tensors, inputs: Any, opts: Any = None) -> Work:
        """Send each rank one of the root's tensors."""
        fills = _list(outputs)
        sends = self._per_rank_like(inputs[0], fills[0]) if inputs else []
        return self._start("scatter", [(sends, fills)], fills, root=_root(opts))

    def reduce_scatter(self, outputs: Tensors, inputs: Any, opts: Any = None) -> Work:
        """Reduce a list of tensors. Each rank gets one of the results."""
        fills = _list(outputs)
        calls = [
            (self._per_rank_like(sends, fill), [fill])
            for fill, sends in zip(fills, inputs, strict=True)
        ]
        return self._start("reduce_scatter", calls, fills, op=_op(opts))

    def reduce_scatter_single(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Work:
        """Reduce one or several tensors. Each rank gets a part of each result."""
        fills = _list(outputs)
        calls = [
            (self._parts(send, fill), [fill])
            for fill, send in zip(fills, _list(inputs), strict=True)
        ]
        return self._start("reduce_scatter_single", calls, fills, op=_op(opts))

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        """Send each rank one tensor of a list."""
        fills = self._per_rank(outputs)
        return self._start("all_to_all", [(self._per_rank(inputs), fills)], fills)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        send: torch.Tensor,
        output_splits: Sequence[int] = (),
        input_splits: Sequence[int] = (),
        opts: Any = None,
    ) -> Work:
        """Send each rank some rows of a tensor."""
        call = self._rows(send, input_splits), self._rows(output, output_splits)
        return self._start("all_to_all_single", [call], [output])

    def send(self, tensors: Tensors, peer: int, tag: int = 0) -> Work:
        """Send tensors to one rank, which must call `recv`."""
        sends = _list(tensors)
        return self._start(
            "send", [([t], []) for t in sends], sends, peer=peer, tag=tag
        )

    def recv(self, tensors: Tensors, peer: int | None, tag: int = 0) -> Work:
        """Receive tensors from one rank."""
        fills = _list(tensors)
        return self._start(
            "recv", [([], [t]) for t in fills], fills, peer=peer, tag=tag
        )

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Work:
        """Receive tensors from the first rank that sends."""
        return self.recv(tensors, None, tag)

    def barrier(self, opts: Any = None) -> Work:
        """Wait until all ranks have called `barrier`."""
        return self._start("barrier", [([], [])], [])

    def among(
        self, members: Members, activity: connection.Activity
    ) -> "SimulatedGroup":
        """Return this rank's process group for `members`."""
        return SimulatedGroup(self.rank_of_run, members, self._post, self.log, activity)

    @property
    def group_name(self) -> str:
        """The name that torch's functional collectives use to find this group."""
        if self._name is None:
            self._name = f"simulated {next(_names)}, rank {self.rank_of_run}"
            c10d._register_process_group(self._name, self)
        return self._name

    def unregister(self) -> bool:
        """Remove the group's name from torch's list. Return whether the name was in the list."""
        if self._name is None:
            return False
        c10d._unregister_process_group(self._name)
        self._name = None
        return True

    def new_group(self, *args: object, **named: object) -> NoReturn:
        """Raise an error, because the simulation does not know new process groups of torch."""
        msg = (
            f"Rank {self.rank_of_run} of {self._size}: a simulated world cannot have new process"
            " groups of torch. Use world.split(size=...), or simulate(size, fn, axes={...}) and"
            " world.along(name). As a DeviceMesh, use world.mesh."
        )
        raise SimulationError(msg)

    def shutdown(self) -> NoReturn:
        """Raise an error, because the group ends when the function of `simulate` ends."""
        msg = (
            f"Rank {self.rank_of_run} of {self._size}: you cannot destroy the process group of a"
            " simulated world. Leave out the call: the group ends with the world."
        )
        raise SimulationError(msg)

    abort = shutdown

    def _in_place(self, kind: str, tensors: Tensors, **options: Any) -> Work:
        """Start one collective per tensor, which receives the result."""
        outputs = _list(tensors)
        return self._start(kind, [([t], [t]) for t in outputs], outputs, **options)

    def _start(
        self,
        kind: str,
        calls: Iterable[tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]],
        outputs: Sequence[torch.Tensor],
        *,
        op: str | None = None,
        root: int | None = None,
        peer: int | None = None,
        tag: int = 0,
    ) -> Work:
        """Post calls, given by the tensors that each call sends and receives."""
        for name, rank in (("root", root), ("peer", peer)):
            if rank is not None and not 0 <= rank < self._size:
                msg = (
                    f"{kind}: {name} is {rank}, but there are only {self._size} ranks."
                )
                raise ArgumentError(msg)
        for tensor in chain.from_iterable(sends for sends, _ in calls):
            if not can_carry_out(kind, op, tensor):
                call = kind if op is None else f"{op} in {kind}"
                msg = (
                    f"Gloo does not support {call} for this tensor:"
                    f" {collectives.format_tensor(tensor)}. So a simulated world rejects it."
                )
                raise ArgumentError(msg)
        new_calls = [
            Call(
                rank=self.rank_of_run,
                kind=kind,
                group=self.members,
                sends=tuple(tensor.detach().clone() for tensor in sends),
                fills=tuple(fills),
                op=op,
                root=None if root is None else self.members.ranks[root],
                peer=None if peer is None else self.members.ranks[peer],
                tag=tag,
                label=self.activity.label,
                structure=self.activity.structure,
                step=self.activity.step,
                site=collectives.site(),
            )
            for sends, fills in calls
        ]
        return self._post(new_calls, outputs)

    def _per_rank(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors as a list, after a check that there is one per rank."""
        if len(tensors) != self._size:
            msg = f"Expected {self._size} tensors, one per rank, got {len(tensors)}."
            raise ArgumentError(msg)
        return list(tensors)

    def _per_rank_like(
        self, tensors: Sequence[torch.Tensor], like: torch.Tensor
    ) -> list[torch.Tensor]:
        """Return the tensors as a list, after a check of their number, shapes and dtypes."""
        for rank, tensor in enumerate(tensors):
            if tensor.shape != like.shape or tensor.dtype is not like.dtype:
                msg = (
                    f"The tensor for rank {rank} is {collectives.format_tensor(tensor)}; expected"
                    f" {collectives.format_tensor(like)}."
                )
                raise ArgumentError(msg)
        return self._per_rank(tensors)

    def _parts(self, full: torch.Tensor, like: torch.Tensor) -> list[torch.Tensor]:
        """Return views of one tensor: one view per rank, each with the shape of `like`."""
        count = self._size * like.numel()
        fits = full.numel() == count and full.dtype is like.dtype
        if not fits or not full.is_contiguous():
            kind = str(like.dtype).removeprefix("torch.")
            msg = (
                f"The tensor for all ranks must be contiguous {kind} with {count} elements"
                f" ({self._size} ranks, {like.numel()} each), got"
                f" {collectives.format_tensor(full)} with strides {full.stride()}."
            )
            raise ArgumentError(msg)
        return list(full.detach().view(self._size, *like.shape))

    def _rows(self, full: torch.Tensor, splits: Sequence[int]) -> list[torch.Tensor]:
        """Return views of a tensor's rows, one view per rank."""
        num_rows = full.shape[0]
        if not splits:
            if num_rows % self._size:
                msg = f"{num_rows} rows do not divide evenly among {self._size} ranks."
                raise ArgumentError(msg)
            splits = [num_rows // self._size] * self._size
        return self._per_rank(full.detach().split(list(splits)))


for _name, _method in {
    "all_gather_single_coalesced": SimulatedGroup.all_gather_single,
    "reduce_scatter_single_coalesced": SimulatedGroup.reduce_scatter_single,
    # the names before torch 2.13
    "_allgather_base": SimulatedGroup.all_gather_single,
    "allgather_into_tensor_coalesced": SimulatedGroup.all_gather_single,
    "_reduce_scatter_base": SimulatedGroup.reduce_scatter_single,
    "reduce_scatter_tensor_coalesced": SimulatedGroup.reduce_scatter_single,
    "alltoall_base": SimulatedGroup.all_to_all_single,
}.items():
    setattr(SimulatedGroup, _name, _method)


def _list(tensors: Tensors) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _op(opts: Any) -> str:
    """Return the name of a reduction, from torch's options or a ReduceOp."""
    reduce_op = getattr(opts, "reduceOp", opts)
    if reduce_op is None:
        return "SUM"
    name: str = getattr(reduce_op, "op", reduce_op).name  # a ReduceOp wraps a RedOpType
    return name


def _root(opts: Any) -> int:
    """Return the root's rank, from torch's options or an integer."""
    return opts if isinstance(opts, int) else getattr(opts, "rootRank", 0)


# torch's caches of device meshes and DTensors, which all ranks of the process share.
#
# torch compares meshes by their shape and by the id of the thread that created them. Python uses
# thread ids again, so a later rank would get an earlier rank's mesh, with the wrong rank and
# groups. torch 2.13 has no public functions to change this.

ASKED = ((device_mesh, "get_backend"), (device_mesh, "threading"))
"""Module attributes that a mesh reads: whether ranks are threads, and the thread's id."""
_numbers = count(1 << 48)


def tell_rank() -> None:
    """Make device meshes see a thread id for this rank that no other rank of any run has."""
    number = next(_numbers)
    answers = (lambda *_: "threaded"), SimpleNamespace(get_ident=lambda: number)  # pyright: ignore[reportUnknownLambdaType]
    for (module, name), answer in zip(ASKED, answers, strict=True):
        setattr(module, name, answer)


def clear_caches() -> None:
    """Clear torch's caches for DTensors, because they keep meshes and groups alive."""
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import _redistribute, debug  # noqa: PLC0415

    debug._clear_sharding_prop_cache()
    _redistribute.clear_redistribute_planner_cache()
    _redistribute._gen_transform_infos.cache_clear()


# The process groups that torch.distributed knows in a simulated rank.
#
# torch keeps all process groups of a process in one object. Each simulated rank has its own such
# object, so nothing of a simulated world is registered with the process. The object has the
# world's group, and a default group that knows its rank and raises an error if it is used to
# communicate. Without a default group, code that calls `is_initialized()` would behave as in a
# single process.


@attrs.define
class Registry:
    """A rank's process groups, with the same attributes as `_World` of torch 2.13."""

    default_pg: dist.ProcessGroup | None = None
    pg_map: dict[dist.ProcessGroup, Any] = attrs.field(factory=dict)
    pg_names: dict[dist.ProcessGroup, str] = attrs.field(factory=dict)
    pg_group_ranks: dict[dist.ProcessGroup, dict[int, int]] = attrs.field(factory=dict)
    pg_backend_config: dict[dist.ProcessGroup, str] = attrs.field(factory=dict)
    tags_to_pg: dict[str, list[dist.ProcessGroup]] = attrs.field(factory=dict)
    pg_to_tag: dict[dist.ProcessGroup, str] = attrs.field(factory=dict)
    pg_coalesce_state: dict[dist.ProcessGroup, list[Any]] = attrs.field(factory=dict)
    comms: list[Any] = attrs.field(factory=list)
    pg_config_info: list[dict[str, Any]] = attrs.field(factory=list)
    group_count: int = 0
    numbers: dict[int, int] = attrs.field(factory=dict[int, int])

    def begin(self, group: SimulatedGroup) -> "Registry":
        """Set the world's group, and number the ranks by their order in that group."""
        self.numbers = {rank: place for place, rank in enumerate(group.members.ranks)}
        default = SimulatedGroup(group.rank_of_run, group.members, _refuse)
        self.default_pg, self.tags_to_pg = default, {"": [group, default]}
        self.add(group)
        self.add(default)
        return self

    def add(self, group: SimulatedGroup) -> None:
        """Register a group of some of the world's ranks."""
        ranks = group.members.ranks
        self.pg_map[group] = ("simulated", None)
        self.pg_names[group] = f"simulated {group.members}".strip()
        self.pg_group_ranks[group] = {
            self.numbers.get(rank, rank): place for place, rank in enumerate(ranks)
        }
        self.pg_backend_config[group] = "cpu:simulated"

    def remove(self, group: SimulatedGroup) -> None:
        """Remove a group from this registry and from torch's list of names."""
        group.unregister()
        groups = self.pg_map, self.pg_names, self.pg_group_ranks, self.pg_backend_config
        for mapping in groups:
            mapping.pop(group, None)

    def close(self) -> None:
        """Remove all groups from torch's list of names."""
        removals = [cast("SimulatedGroup", group).unregister() for group in self.pg_map]
        if any(removals):
            clear_caches()


def _refuse(calls: Sequence[Call], outputs: Sequence[torch.Tensor]) -> NoReturn:
    del outputs
    call = calls[0]
    msg = (
        f"Rank {call.rank} of a simulated world called {call.kind} on torch's default"
        " process group, which a simulated world does not have. Pass group=world.group to"
        " collectives, process_group=world.group to DistributedDataParallel, and"
        " mesh=world.mesh to functions that take a DeviceMesh."
    )
    raise DefaultGroupError(msg)


# A module for the meta device: torch looks up `torch.<device type>`, but has no `torch.meta`.


class _Stream(torch.cpu.Stream):
    """A stream that does nothing, like the CPU's stream. Its events are complete."""

    def record_event(self, event: Any = None) -> Any:
        """Return a complete event."""
        del event
        return torch.cpu.Event()


_META = SimpleNamespace(
    Stream=_Stream,
    Event=torch.cpu.Event,
    stream=torch.cpu.stream,
    device_count=lambda: 1,
    current_device=lambda: 0,
    is_initialized=lambda: True,
    current_stream=_Stream,  # its only argument has no effect
)
"""The module `torch.meta` for the meta device, with one device."""


@contextmanager
def known_to_torch(device: torch.device) -> Generator[None]:
    """In a `with` block: add the module `torch.meta` if ranks compute on the meta device."""
    if device.type != "meta" or hasattr(torch, "meta"):
        yield
        return
    setattr(torch, device.type, _META)
    try:
        yield
    finally:
        delattr(torch, device.type)


# The error message for a rank that reads the value of a meta tensor.


_TORCH = str(Path(torch.__file__).parent) + os.sep
_LIBRARY = str(Path(__file__).parents[3]) + os.sep


def explain_meta_error(error: BaseException) -> BaseException:
    """Return an error that names the line that read a meta value; return others unchanged."""
    first = error.__cause__ if isinstance(error, Error) else error
    is_torchs = isinstance(first, (RuntimeError, ValueError)) and not isinstance(
        first, Error
    )
    if not is_torchs or "meta" not in str(first).lower():
        return error
    msg = (
        f"{_line_of(error)} reads the value of a tensor, but tensors on the meta device have no"
        f" values: {str(first).splitlines()[0].rstrip('.;!')}. Remove calls such as float(loss)"
        " or metrics.all_reduce_mean(world), and transforms that depend on values. Or run with"
        ' device="cpu".'
    )
    meta_error = SimulationError(msg)
    meta_error.__cause__ = error
    return meta_error


def _line_of(error: BaseException) -> str:
    """Return the file and line of the innermost frame outside torch and its call wrappers."""
    place = ""
    for frame, line in walk_tb(error.__traceback__):
        code = frame.f_code
        path, passes_on = code.co_filename, code.co_name == "__torch_function__"
        if not passes_on and not path.startswith((_TORCH, "<")):
            place = f"{path.removeprefix(_LIBRARY)}:{line}"
    return place


# The cost of a collective on the links between ranks, for each algorithm.
#
# Each rank has one link, which sends and receives at the same time. Bytes are payload bytes. N is
# the number of ranks, and n the number of bytes that each rank sends.
#
# - all_reduce: "ring" and "gloo" take 2 (N-1) rounds of n/N, "tree" 2 log2 N rounds of n.
# - reduce_scatter: N-1 rounds of n/N; "gloo" runs an all_reduce. For one tensor, accelfn uses
#   all_to_all on Gloo, which costs the same as the ring.
# - all_gather: N-1 rounds of n.
# - broadcast: "ring" is a pipeline with N-1 rounds and n bytes per link; "tree" and "gloo" take
#   log2 N rounds of n.
# - reduce: as broadcast; "gloo" runs a reduce_scatter and a gather.
# - scatter, gather, all_to_all: N-1 rounds, each with the bytes for one rank.


Algorithm: TypeAlias = Literal["ring", "tree", "gloo"]


@attrs.frozen
class Cost:
    """The cost of one collective on the network links.

    Attributes:
        num_bytes: the bytes that all ranks together send.
        rounds: the number of messages that must follow each other, because each waits for the
            one before.
        busiest: the bytes that the link with the most traffic carries.
    """

    num_bytes: int
    rounds: int
    busiest: float

    def twice(self) -> "Cost":
        """Return twice the cost: once to compute a sum, once to distribute it."""
        return Cost(2 * self.num_bytes, 2 * self.rounds, 2 * self.busiest)


@attrs.frozen(kw_only=True)
class Payload:
    """The properties of one collective that determine its cost.

    Attributes:
        kind: torch's name of the collective.
        ranks: the number of ranks that take part.
        most: the largest number of bytes that one rank sends for other ranks.
        total: the bytes that all ranks together send for other ranks.
        is_sparse: whether the tensors are sparse.
    """

    kind: str
    ranks: int
    most: int
    total: int
    is_sparse: bool = False


def payload_of(entry: Entry) -> Payload:
    """Return the payload of a collective in a log."""
    return Payload(
        kind=entry.kind,
        ranks=len(entry.ranks),
        most=max(entry.for_others),
        total=sum(entry.for_others),
        is_sparse="sparse" in entry.shapes,
    )


def cost(payload: Payload, algorithm: Algorithm) -> Cost:
    """Return the cost of a collective under an algorithm."""
    if payload.ranks == 1:
        return Cost(0, 0, 0.0)
    kind, n, hops = payload.kind, payload.most, payload.ranks - 1
    if payload.is_sparse and kind == "all_reduce":  # ranks all-gather sparse tensors
        kind = "all_gather"
    depth = hops.bit_length()
    # a tree sends from one rank to two, to four, or back
    tree = Cost(hops * n, depth, depth * n)
    # pieces of a tensor pass from rank to rank, or each piece passes once around the ring
    pipeline = Cost(hops * n, hops, n)
    pieces = Cost(hops * n, hops, hops * n / payload.ranks)
    all_gather = Cost(hops * payload.total, hops, hops * n)
    to_each_its_own = Cost(payload.total, hops, n)
    costs = {
        "all_reduce": pieces.twice(),
        "reduce_scatter": pieces,
        "reduce_scatter_single": pieces,
        "all_gather": all_gather,
        "all_gather_single": all_gather,
        "broadcast": pipeline,
        "reduce": pipeline,
        "gather": Cost(payload.total, hops, payload.total),
        "scatter": to_each_its_own,
        "all_to_all": to_each_its_own,
        "all_to_all_single": to_each_its_own,
        "barrier": tree,
        "send": pipeline,
    }
    if algorithm == "tree":
        costs |= {"all_reduce": tree.twice(), "broadcast": tree, "reduce": tree}
    elif algorithm == "gloo":
        # a reduce is a reduce_scatter in a ring, and a gather on the root
        num_bytes = pieces.num_bytes + n - n // payload.ranks
        reduce = Cost(num_bytes, 2 * hops, 2 * pieces.busiest)
        costs |= {"reduce_scatter": pieces.twice(), "broadcast": tree, "reduce": reduce}
    return costs[kind]
