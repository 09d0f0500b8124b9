# SPDX-License-Identifier: Apache-2.0
"""A torch process group in memory, so that torch's own code runs on it unchanged.

It has the methods by which `torch.distributed` and DistributedDataParallel of torch 2.13 to
2.15 call a group, and makes of each what all have in common: calls, with copies of what the
rank gives, and a work that fills what it gets.
"""

import os
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from traceback import walk_tb
from types import SimpleNamespace
from typing import Any, Literal, NoReturn, TypeAlias, cast, get_args

import attrs
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import Work
from torch.distributed import device_mesh

from accelfn.collectives.failures import format_tensor, site
from accelfn.errors import ArgumentError, DefaultGroupError, Error, SimulationError
from accelfn.testing.simulation.calls import Call, Entry, Members
from accelfn.testing.simulation.exchange import can_carry_out
from accelfn.world.connection import Activity

# pyright: reportIncompatibleMethodOverride=false, reportPrivateUsage=false
# pyright: reportPrivateUsage=false

# torch's stubs name the same parameter differently from method to method

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
                msg = f"Gloo has no {what} of a tensor such as {format_tensor(each)}."
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
                    f"The tensor for rank {rank} is {format_tensor(each)}; expected"
                    f" {format_tensor(like)}."
                )
                raise ArgumentError(msg)
        return self._each(tensors)

    def _parts(self, whole: torch.Tensor, like: torch.Tensor) -> list[torch.Tensor]:
        """Return views of one tensor as one part a rank, each like another tensor."""
        fits = whole.numel() == self._size * like.numel() and whole.dtype is like.dtype
        if not fits or not whole.is_contiguous():
            msg = (
                f"Expected a contiguous tensor of {self._size} times the elements of"
                f" {format_tensor(like)}, got {format_tensor(whole)} of strides {whole.stride()}."
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


# What torch keeps of meshes and DTensors once a process, which ranks that are threads
# share.
#
# A mesh is equal to another by its shape and by the thread that made it, and what torch has
# worked out for a DTensor on one is kept by that. Threads' numbers are used again, so a
# later rank would get an earlier one's mesh, with its place and its groups.


# torch 2.13 has no public names for these

ASKED = ((device_mesh, "get_backend"), (device_mesh, "threading"))
"""Where a mesh asks whether ranks are threads, and which it is made by."""
_numbers = count(1 << 48)


def tell_rank() -> None:
    """Tell the meshes of this rank a number that no other rank of any run has."""
    number = next(_numbers)
    answers = _threaded_backend, SimpleNamespace(get_ident=lambda: number)
    for (module, name), answer in zip(ASKED, answers, strict=True):
        setattr(module, name, answer)


def _threaded_backend(group: Any = None) -> str:
    del group
    return "threaded"


def forget() -> None:
    """Let torch forget what it worked out; it keeps meshes, and their groups, alive by it."""
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import _redistribute, debug  # noqa: PLC0415

    debug._clear_sharding_prop_cache()
    _redistribute.clear_redistribute_planner_cache()
    _redistribute._gen_transform_infos.cache_clear()


# What torch.distributed knows in a simulated rank, in place of what the process knows.
#
# torch keeps process groups in one object a process, and swaps it whole for whoever asks;
# so nothing of a simulated world is registered with the process. In a rank torch has the
# group of the world, by which it translates ranks, and a default group that tells the rank
# and refuses to communicate: without one, code that asks `is_initialized()` would take
# itself for alone.


@attrs.define
class Registry:
    """What torch 2.13 calls its `_World`: groups and what it keeps of each."""

    default_pg: dist.ProcessGroup | None
    pg_map: dict[dist.ProcessGroup, Any]
    pg_names: dict[dist.ProcessGroup, str]
    pg_group_ranks: dict[dist.ProcessGroup, dict[int, int]]
    pg_backend_config: dict[dist.ProcessGroup, str]
    tags_to_pg: dict[str, list[dist.ProcessGroup]]
    pg_to_tag: dict[dist.ProcessGroup, str] = attrs.field(factory=dict)
    pg_coalesce_state: dict[dist.ProcessGroup, list[Any]] = attrs.field(factory=dict)
    comms: list[Any] = attrs.field(factory=list)
    pg_config_info: list[dict[str, Any]] = attrs.field(factory=list)
    group_count: int = 0
    numbers: dict[int, int] = attrs.field(factory=dict[int, int])

    @classmethod
    def of(cls, group: SimulatedGroup) -> "Registry":
        """Return what torch is to know in a rank that has this group."""
        registry = cls(
            default_pg=None,
            pg_map={},
            pg_names={},
            pg_group_ranks={},
            tags_to_pg={},
            pg_backend_config={},
        )
        registry.begin(group)
        return registry

    def begin(self, group: SimulatedGroup) -> None:
        """Let this be the group of the world, whose ranks are numbered by their places."""
        self.numbers = {rank: place for place, rank in enumerate(group.members.ranks)}
        default = SimulatedGroup(group.rank_of_run, group.members, _refuse)
        self.default_pg, self.tags_to_pg = default, {"": [group, default]}
        self.add(group)
        self.add(default)

    def add(self, group: SimulatedGroup) -> None:
        """Let torch know a group of the world's ranks."""
        ranks = group.members.ranks
        self.pg_map[group] = ("simulated", None)
        self.pg_names[group] = f"simulated {group.members}".strip()
        self.pg_group_ranks[group] = {
            self.numbers.get(rank, rank): place for place, rank in enumerate(ranks)
        }
        self.pg_backend_config[group] = "cpu:simulated"

    def remove(self, group: SimulatedGroup) -> None:
        """Let torch forget a group."""
        group.forget()
        for each in (self.pg_map, self.pg_names, self.pg_group_ranks):
            each.pop(group, None)
        self.pg_backend_config.pop(group, None)

    def close(self) -> None:
        """Let the process forget what it knows by name."""
        forgotten = [cast("SimulatedGroup", group).forget() for group in self.pg_map]
        if any(forgotten):
            forget()


def _refuse(calls: Sequence[Call], returned: Sequence[torch.Tensor]) -> NoReturn:
    del returned
    call = calls[0]
    msg = (
        f"Rank {call.rank} of a simulated world called {call.kind} on torch's default"
        " process group, and there is none: pass group=world.group;"
        " process_group=world.group to DistributedDataParallel, mesh=world.mesh to what takes"
        " a mesh."
    )
    raise DefaultGroupError(msg)


# What torch asks a kind of device for, of the meta device: how many, and streams to wait
# for.


# torch finds the module of a kind of device by its name, and has none of meta


class _Stream(torch.cpu.Stream):
    """A stream on which nothing waits for anything, as the CPU's, with an event to show."""

    def record_event(self, event: Any = None) -> Any:
        """Return an event that has come."""
        del event
        return torch.cpu.Event()


class _Meta:
    """The one device of its kind."""

    Stream, Event = _Stream, torch.cpu.Event
    stream = staticmethod(torch.cpu.stream)

    @staticmethod
    def device_count() -> int:
        """Return how many there are for a rank."""
        return 1

    @staticmethod
    def current_device() -> int:
        """Return its number."""
        return 0

    @staticmethod
    def is_initialized() -> bool:
        """Return whether there is nothing to set up any more."""
        return True

    @staticmethod
    def current_stream(device: Any = None) -> _Stream:
        """Return a stream."""
        del device
        return _Stream()


@contextmanager
def known_to_torch(device: torch.device) -> Generator[None]:
    """Let torch find a module of the meta device, while ranks are on it."""
    name = device.type
    if name != "meta" or hasattr(torch, name):
        yield
        return
    setattr(torch, name, _Meta)
    try:
        yield
    finally:
        delattr(torch, name)


# What is said where ranks are on the meta device, and one of them asks for a value.


_TORCH = str(Path(torch.__file__).parent) + os.sep
_LIBRARY = str(Path(__file__).parents[3]) + os.sep


def explain_meta_error(error: BaseException) -> BaseException:
    """Return what names the line that asked for a value; what is no such error is as it was."""
    first = error.__cause__ if isinstance(error, Error) else error
    is_torchs = isinstance(first, (RuntimeError, ValueError)) and not isinstance(
        first, Error
    )
    if not is_torchs or "meta" not in str(first).lower():
        return error
    msg = (
        f"{_line_of(error)} asks for values, and tensors on the meta device have none:"
        f" {str(first).splitlines()[0].rstrip('.;!')}. Leave out what reads them, as float(loss),"
        " af.mean(metrics, world) or a transform that decides by them; or let it run with"
        ' values, device="cpu".'
    )
    raised = SimulationError(msg)
    raised.__cause__ = error
    return raised


def _line_of(error: BaseException) -> str:
    """Return file and line of the innermost frame that is not torch's, nor passes a call on."""
    found = ""
    for frame, line in walk_tb(error.__traceback__):
        code = frame.f_code
        path, passes_on = code.co_filename, code.co_name == "__torch_function__"
        if not passes_on and not path.startswith((_TORCH, "<")):
            found = f"{path.removeprefix(_LIBRARY)}:{line}"
    return found


# Wire: what a collective costs on the links between ranks, by how it is carried out.
#
# Each rank has a link of its own, which sends and receives at once. Bytes are those of the
# payload. In what follows N is the number of ranks, n what each gives.
#
# | collective | ring | tree | Gloo | | --- | --- | --- | --- | | all_reduce | 2 (N-1)
# rounds of n/N | 2 log2 N rounds of n | as a ring | | reduce_scatter | N-1 rounds of n/N |
# as a ring | as an all_reduce; of one tensor, which accelfn sends by all_to_all, as a ring
# | | all_gather | N-1 rounds of n | as a ring | as a ring | | broadcast, reduce | in a
# pipeline: N-1 rounds, n in all | log2 N rounds of n | broadcast as a tree; reduce as a
# reduce_scatter and a gather | | scatter, gather, all_to_all | N-1 rounds, to each its own
# | as a ring | as a ring |


Algorithm: TypeAlias = Literal["ring", "tree", "gloo"]


@attrs.frozen(kw_only=True)
class Cost:
    """What one collective asks of the links.

    Attributes:
        num_bytes: what all ranks send together.
        rounds: how often a rank waits for a message before it can go on.
        busiest: the bytes that one after the other cross the link that has most to do.
    """

    num_bytes: int
    rounds: int
    busiest: float


@attrs.frozen(kw_only=True)
class Payload:
    """What ranks give to one collective, as far as its cost depends on it.

    Attributes:
        kind: torch's name of the collective.
        ranks: how many take part.
        most: the bytes for others that one rank gives, the most of all.
        total: those of all ranks.
        is_sparse: whether they are those of sparse tensors.
    """

    kind: str
    ranks: int
    most: int
    total: int
    is_sparse: bool = False


def payload_of(entry: Entry) -> Payload:
    """Return what ranks gave to a collective of a log."""
    return Payload(
        kind=entry.kind,
        ranks=len(entry.ranks),
        most=max(entry.for_others),
        total=sum(entry.for_others),
        is_sparse="sparse" in entry.shapes,
    )


def check_algorithm(call: str, algorithm: object) -> None:
    """Raise unless it is one of those that are known.

    Raises:
        ArgumentError: it is none.
    """
    if algorithm not in get_args(Algorithm):
        known = ", ".join(map(repr, get_args(Algorithm)))
        msg = f"{call}(algorithm={algorithm!r}): expected one of {known}."
        raise ArgumentError(msg)


def cost(what: Payload, algorithm: Algorithm) -> Cost:
    """Return what a collective costs."""
    if what.ranks == 1:
        return Cost(num_bytes=0, rounds=0, busiest=0.0)
    kind = what.kind
    if what.is_sparse and kind == "all_reduce":  # ranks tell one another what they have
        kind = "all_gather"
    return _COSTS[algorithm][kind](what)


def _pipeline(what: Payload) -> Cost:
    """From rank to rank, part by part."""
    hops, n = what.ranks - 1, what.most
    return Cost(num_bytes=hops * n, rounds=hops, busiest=n)


def _in_a_tree(what: Payload) -> Cost:
    """From one rank to two, to four, or back."""
    n, depth = what.most, (what.ranks - 1).bit_length()
    return Cost(num_bytes=(what.ranks - 1) * n, rounds=depth, busiest=depth * n)


def _reduce_scatter(what: Payload) -> Cost:
    """Each part once round the ring."""
    hops, n = what.ranks - 1, what.most
    return Cost(num_bytes=hops * n, rounds=hops, busiest=hops * n / what.ranks)


def _twice(once: Callable[[Payload], Cost]) -> Callable[[Payload], Cost]:
    """To where the sum is made, and back in the same manner."""

    def cost(what: Payload) -> Cost:
        there = once(what)
        return Cost(
            num_bytes=2 * there.num_bytes,
            rounds=2 * there.rounds,
            busiest=2 * there.busiest,
        )

    return cost


def _reduce_by_gloo(what: Payload) -> Cost:
    """Once round the ring, and from there to the root."""
    ring, n = _reduce_scatter(what), what.most
    gathered = n - n // what.ranks
    return Cost(
        num_bytes=ring.num_bytes + gathered,
        rounds=2 * ring.rounds,
        busiest=2 * ring.busiest,
    )


def _all_gather(what: Payload) -> Cost:
    hops = what.ranks - 1
    return Cost(num_bytes=hops * what.total, rounds=hops, busiest=hops * what.most)


def _gather(what: Payload) -> Cost:
    return Cost(num_bytes=what.total, rounds=what.ranks - 1, busiest=what.total)


def _to_each_its_own(what: Payload) -> Cost:
    return Cost(num_bytes=what.total, rounds=what.ranks - 1, busiest=what.most)


def _message(what: Payload) -> Cost:
    return Cost(num_bytes=what.most, rounds=1, busiest=what.most)


_RING: Mapping[str, Callable[[Payload], Cost]] = {
    "all_reduce": _twice(_reduce_scatter),
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_single": _reduce_scatter,
    "all_gather": _all_gather,
    "all_gather_single": _all_gather,
    "broadcast": _pipeline,
    "reduce": _pipeline,
    "gather": _gather,
    "scatter": _to_each_its_own,
    "all_to_all": _to_each_its_own,
    "all_to_all_single": _to_each_its_own,
    "barrier": _in_a_tree,
    "send": _message,
}
_COSTS: Mapping[Algorithm, Mapping[str, Callable[[Payload], Cost]]] = {
    "ring": _RING,
    "tree": {
        **_RING,
        "all_reduce": _twice(_in_a_tree),
        "broadcast": _in_a_tree,
        "reduce": _in_a_tree,
    },
    "gloo": {
        **_RING,
        "reduce_scatter": _twice(_reduce_scatter),
        "broadcast": _in_a_tree,
        "reduce": _reduce_by_gloo,
    },
}
