# SPDX-License-Identifier: Apache-2.0
"""The world: which rank this is, of how many, on which device, talking through what.

A `World` is passed, never looked up. This is the one file that reads the environment.
"""

import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from types import TracebackType
from typing import Any, Literal, Self, TypeAlias

import attrs
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from accelfn.base.arguments import (
    check_seconds,
    explain_call_errors,
    hint_attributes,
    is_integer,
)
from accelfn.base.devices import choose_device, parse_device
from accelfn.errors import ArgumentError, PeerFailedError, WorldError
from accelfn.world import axes as arithmetic
from accelfn.world.connection import Connection, open_groups, open_rows
from accelfn.world.meeting import (
    Meeting,
    check_backend,
    explain_opening,
    join,
    refuse_open_group,
    regrouping_of,
)
from accelfn.world.place import Environment, Place, asked_size, read_place


def _connection_of(group: "dist.ProcessGroup | Connection | None") -> Connection:
    """Return the connection of another world, or a new connection."""
    return group if isinstance(group, Connection) else Connection(group)


@explain_call_errors
@hint_attributes("setattr")
@attrs.frozen(kw_only=True, eq=False)
class World:
    """One rank's place among all ranks of a job.

    Attributes:
        rank: this process, 0 to `size - 1`.
        size: the number of processes that train together.
        local_rank: this process among the processes of its machine.
        local_size: the number of processes on its machine.
        node_rank: its machine.
        device: the device of its tensors.
        checked: whether ranks compare each of accelfn's collectives before they call it.
        axes: the sizes of its axes by name, outermost first; empty without axes.
        connection: holds the torch process group, `group`, until the world is closed, and
            notes this rank's activity, for errors.

    Use it as a context manager: leaving the block closes what `from_env` opened.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node_rank: int = 0
    device: torch.device = attrs.field(
        factory=lambda: torch.device("cpu"), converter=parse_device
    )
    checked: bool = False
    axes: Mapping[str, int] = attrs.field(factory=dict[str, int])
    connection: Connection = attrs.field(
        default=None, alias="group", converter=_connection_of, repr=False
    )
    _whole: "World | None" = attrs.field(default=None, repr=False, alias="whole")

    def __attrs_post_init__(self) -> None:
        """Raise for a rank outside its world, and for several ranks without a group."""
        least = {"size": 1, "local_rank": 0, "local_size": 1, "node_rank": 0, "rank": 0}
        for name, first in least.items():
            value = getattr(self, name)
            if not is_integer(value, first):
                msg = f"World({name}={value!r}): expected an integer, {first} or more."
                raise WorldError(msg)
        call = f"World(rank={self.rank}, size={self.size})"
        if self.rank >= self.size:
            msg = f"{call}: the rank must be 0 to {self.size - 1}."
            raise WorldError(msg)
        if self.size > 1 and self.connection.group is None:
            msg = f"{call} needs a process group: use World.from_env()."
            raise WorldError(msg)
        if self.axes:
            sizes = arithmetic.resolve_axes("World", self.axes, self.size)
            object.__setattr__(self, "axes", sizes)
            if set(arithmetic.neighbor_runs(sizes)) - self.connection.parts.keys():
                msg = f"World(axes={sizes}): use World.from_env(axes=...), which opens groups."
                raise WorldError(msg)

    @classmethod
    def single(cls, *, device: str | torch.device | None = None) -> Self:
        """Return the world of one process, without a process group.

        Args:
            device: "cpu", or a device of torch.accelerator: "cuda", "xpu", "mps", "npu", ...;
                default its first device, or the CPU if there is none.

        Raises:
            WorldError: the environment asks for several processes, this is a simulated rank, or
                the device does not exist.
        """
        name, size = asked_size(os.environ)
        if size > 1:
            msg = (
                f"{name} is {size}, but each of the {size} ranks would train alone. Use"
                " af.World.from_env(), and pass the world."
            )
            raise WorldError(msg)
        refuse_open_group()
        return cls(device=choose_device(device, local_rank=0))

    @classmethod
    @explain_call_errors
    def from_env(
        cls,
        *,
        timeout: float = 300.0,
        backend: str | None = None,
        device: str | torch.device | None = None,
        checked: bool = False,
        axes: Mapping[str, int] | None = None,
    ) -> Self:
        """Join the world that the launcher describes in the environment.

        The launcher is torchrun or `accelfn launch` (`RANK`, `WORLD_SIZE`, …), else mpirun
        (`OMPI_COMM_WORLD_RANK`, `PMI_RANK`, …), else srun (`SLURM_PROCID`, …). Without a
        launcher this is the world of a single process. With a launcher, accelfn opens the
        process group (torch's default group, which SyncBatchNorm and others read) and closes it
        when the `with` block ends, or with the interpreter. A group that is already open is
        used and left open. Under `accelfn launch --elastic` a process that replaces a failed
        process has its own world, until `af.regroup` adds it to the others.

        Args:
            timeout: seconds after which a collective fails if a rank does not join it. All
                ranks must meet within this time after their start, so give the slowest rank
                time to import torch. After 10 s a rank names the ranks that it waits for.
            backend: a backend of torch.distributed; default "gloo" on CPU, elsewhere torch's
                backend for the device together with gloo: "cpu:gloo,cuda:nccl".
            device: "cpu", or a device of torch.accelerator: "cuda", "xpu", "mps", "npu", ...;
                default the device of the local rank, or the CPU if there is none.
            checked: whether ranks compare their calls before each of accelfn's collectives, so
                that a mismatch is a `CollectiveMismatchError` on all ranks, not a hang, an abort
                or a wrong number. It costs a gather of 8 bytes per call. The collectives of
                `wrap_ddp` and `wrap_fsdp` are torch's own and not compared.
            axes: how the ranks share the work, as sizes by name: "dp_replicate" copies of the
                model, each split over "dp_shard" ranks; "cp" parts of one sequence; "tp" parts
                of one layer. The order is fixed, with the last innermost; -1 is the rest.
                Default: the axes of `accelfn launch --axes` (`ACCELFN_AXES`), or none: all ranks
                have copies, or shards of one copy with `wrap_fsdp`.

        Raises:
            ArgumentError: the axes do not multiply to the world's size or differ from the
                launcher's, or an argument is invalid.
            WorldError: a variable is missing, malformed or contradicts another, or the backend
                or the device does not exist. Nothing falls back silently.
            PeerFailedError: another rank ended before all ranks were joined.
        """
        place, own_device, sizes, connection = open_world(
            os.environ, timeout=timeout, backend=backend, device=device, axes=axes
        )
        return cls(
            rank=place.rank,
            size=place.size,
            local_rank=place.local_rank,
            local_size=place.local_size,
            node_rank=place.node_rank,
            device=own_device,
            checked=checked,
            axes=sizes,
            group=connection,
        )

    def followed(self, rank: int, size: int, connection: Connection) -> "World":
        """Return the world of ranks that regrouped; it closes with this world."""
        successor = attrs.evolve(
            self,
            rank=rank,
            size=size,
            local_rank=rank,
            local_size=size,
            group=connection,
        )
        self.connection.successor = successor
        if size > 1 and connection.simulated is None:
            connection.own()
        return successor

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which prints and writes for all."""
        return self.rank == 0

    def along(self, *names: str) -> "World":
        """Return the ranks that differ from this rank in these axes only, as a world.

        Every collective takes it, and so do `print_once` and `barrier`. Its `rank` and `size`
        count along the axes. An axis that this world does not have has one rank.

        Args:
            names: names of one axis, or of several neighboring axes.

        Raises:
            ArgumentError: a name is unknown, or the axes are not neighbors.
        """
        for name in names:
            arithmetic.check_name("World.along", name)
        chosen = arithmetic.long(self.axes, names)
        if chosen == arithmetic.long(self.axes, tuple(self.axes)) and (
            chosen or self.size == 1
        ):
            return self
        ranks = arithmetic.row(self.axes, chosen, self.rank)
        part = self.connection.parts.get(chosen)
        if part is None and len(ranks) > 1:
            msg = (
                f"World.along({', '.join(map(repr, names))}): expected neighboring axes; the"
                f" axes are {dict(self.axes)}, outermost first."
            )
            raise ArgumentError(msg)
        if part is None:
            part = Connection(None, activity=self.connection.activity)
        axes = {name: self.axes[name] for name in chosen}
        return self._part(ranks, part, axes=axes)

    def split(
        self, *, size: int | None = None, by: Literal["node"] | None = None
    ) -> "World":
        """Return this rank's part of the world, as a world of its own.

        Every collective takes it, and you can train a state in it. It has no axes, and closes
        with the whole world. Call `split` on all ranks: the first call opens process groups.

        Args:
            size: the number of neighboring ranks in a part; it divides the world's size.
            by: "node" for the ranks of one machine.

        Raises:
            ArgumentError: neither or both are given, or the size does not divide the ranks.
            WorldError: this world is a part itself.

        Law: a reduction within parts, then `across` them, is the reduction over all ranks.

        Cost: at first a process group for each part; by="node" gathers 8 bytes at each call.
        """
        return self._split_world("World.split", size, by)

    def across(
        self, *, size: int | None = None, by: Literal["node"] | None = None
    ) -> "World":
        """Return the ranks at this rank's place in each part of `split`, as a world.

        With `size` its `rank` is the number of the part. Arguments, errors and cost are the
        same as for `split`.

        Raises:
            WorldError: machines run different numbers of ranks; and as `split`.
        """
        return self._split_world("World.across", size, by)

    def _split_world(self, call: str, size: int | None, by: str | None) -> "World":
        usage = check_given(call, size, by, self.size)
        if self._whole is not None:
            msg = f"{usage}: this is a part of a world. Split the whole: world.whole."
            raise WorldError(msg)
        assert self.group is not None or self.size == 1  # noqa: S101 - it raises if closed
        rows = self._rows_by_node() if size is None else of_size(size, self.size)
        if call == "World.across":
            rows = across(usage, rows)
        (ranks,) = (row for row in rows if self.rank in row)
        name = usage.removeprefix("World.")
        joins = open_part(name, rows, ranks, self.connection, self.device)
        return self._part(ranks, joins, axes={})

    def _rows_by_node(self) -> "Rows":
        """Return the ranks of each machine, by a collective of 8 bytes per rank."""
        own_node = torch.tensor([self.node_rank], device=self.device)
        nodes = [own_node] * self.size
        if self.size > 1:
            nodes = [torch.empty_like(own_node) for _ in nodes]
            dist.all_gather(nodes, own_node, group=self.group)
        by_node: dict[int, list[int]] = {}
        for rank, node in enumerate(nodes):
            by_node.setdefault(int(node), []).append(rank)
        return [tuple(ranks) for ranks in by_node.values()]

    def _part(
        self, ranks: Sequence[int], joins: Connection, *, axes: Mapping[str, int]
    ) -> "World":
        return attrs.evolve(
            self,
            rank=ranks.index(self.rank),
            size=len(ranks),
            axes=axes,
            group=joins,
            whole=self.whole,
        )

    @cached_property
    def batch(self) -> "World":
        """The ranks that share a batch: along the two axes of data."""
        return self.along(*arithmetic.BATCH) if self.axes else self

    @cached_property
    def loss(self) -> "World":
        """The ranks that share a loss: the ranks of `batch`, and along "cp"."""
        return self.along(*arithmetic.LOSS) if self.axes else self

    @property
    def whole(self) -> "World":
        """The world of all ranks; this world, unless it is a part."""
        return self if self._whole is None else self._whole

    @property
    def mesh(self) -> "DeviceMesh":
        """The axes of several ranks as torch's DeviceMesh, for its DTensors.

        Raises:
            WorldError: no axis has several ranks.
        """
        if not arithmetic.long(self.axes, tuple(self.axes)):
            msg = (
                "World.mesh: this world has no axis of several ranks. Name them:"
                ' World.from_env(axes={"dp_shard": -1}).'
            )
            raise WorldError(msg)
        return mesh_of(self.axes, self.connection, self.device)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The torch process group that joins the ranks; None in a world of 1.

        Raises:
            WorldError: the world is closed.
        """
        if self.connection.is_closed:
            advice = "use it inside its `with` block"
            if self.connection.successor is not None:
                advice = "af.regroup made another: use the world of the new state, state.world"
            msg = f"The world of {self.size} ranks is closed; {advice}."
            raise WorldError(msg)
        self.connection.check_not_lent()
        return self.connection.group

    def close(self) -> None:
        """Close the process group, if `from_env` opened it; you can call it again.

        A part closes with its whole.
        """
        if self._whole is None:
            self.connection.end()
            self.connection.activity.close()

    def __enter__(self) -> Self:
        """Return the world itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the process group that `from_env` opened.

        After an exception the group closes with the interpreter: the other ranks notice the
        closing, and this rank must print its traceback before theirs.
        """
        if error is None:
            self.close()
        else:
            self.connection.fail(error)


# Parts of a world: neighboring ranks or the ranks of a machine, and the ranks at one place of
# each part.


Rows: TypeAlias = list[tuple[int, ...]]
"""The ranks of each part of a world, in ascending order."""


def check_given(call: str, size: int | None, by: str | None, num_ranks: int) -> str:
    """Return a call of `split` as text, after checking its arguments.

    Raises:
        ArgumentError: both or neither argument is given, or the argument is invalid.
    """
    if (size is None) is (by is None):
        msg = f'{call}: expected either size=, a number of ranks, or by="node".'
        raise ArgumentError(msg)
    usage = f"{call}(by={by!r})" if size is None else f"{call}(size={size!r})"
    if size is None and by != "node":
        msg = f'{usage}: expected by="node", the ranks of one machine.'
        raise ArgumentError(msg)
    if size is not None and (not is_integer(size, 1) or num_ranks % size):
        divisors = [str(n) for n in range(1, num_ranks + 1) if num_ranks % n == 0]
        msg = f"{usage}: expected a number that divides {num_ranks}: {', '.join(divisors)}."
        raise ArgumentError(msg)
    return usage


def of_size(size: int, num_ranks: int) -> Rows:
    """Return parts of `size` neighboring ranks."""
    return [tuple(range(at, at + size)) for at in range(0, num_ranks, size)]


def across(usage: str, rows: Rows) -> Rows:
    """Return the ranks at each place of the parts.

    Raises:
        WorldError: parts have different numbers of ranks.
    """
    sizes = [len(row) for row in rows]
    if len(set(sizes)) > 1:
        counts = ", ".join(map(str, sizes))
        msg = f"{usage}: machines have {counts} ranks. Start the same number on each."
        raise WorldError(msg)
    return [tuple(sorted(ranks)) for ranks in zip(*rows, strict=True)]


def open_part(
    name: str,
    rows: Rows,
    ranks: tuple[int, ...],
    connection: Connection,
    device: torch.device,
) -> Connection:
    """Return the connection of a rank's part; all ranks open all parts, once."""
    if len(rows) == 1:
        return connection
    if (name,) not in connection.parts:
        group = simulation = None
        if connection.simulated is None:
            everyone = dist.get_process_group_ranks(connection.group)
            of_run = [tuple(everyone[rank] for rank in row) for row in rows]
            seconds = connection.timeout(device)
            group = open_rows(of_run, of_run[rows.index(ranks)][0], seconds, name)
        elif len(ranks) > 1:
            group, simulation = connection.simulated.part(name, ranks)
        connection.add_part((name,), group, simulation)
        connection.parts[name,].parts = {}
    return connection.parts[name,]


# The ranks that share a model's shards: gradients along "cp" are summed as along "dp_shard".


_FOLDED = ("dp_shard x cp",)


def fold_axes(world: World) -> World:
    """Return the ranks that may share a model's shards, with "cp" folded into "dp_shard".

    Without axes all ranks share one copy.
    """
    if not world.axes:
        return attrs.evolve(world, axes={"dp_shard": world.loss.size})
    axes = arithmetic.fold_cp(world.axes)
    if axes == world.axes:
        return world
    connection = world.connection
    if _FOLDED not in connection.parts:
        group: Any = connection.group
        connection.add_part(_FOLDED, group, connection.simulated)
        parent = connection.parts[_FOLDED]
        parent.parts = {}
        for names in arithmetic.neighbor_runs(axes):
            inner = (*names, "cp") if "dp_shard" in names else names
            part = connection.parts[arithmetic.long(world.axes, inner)]
            group = part.group
            parent.add_part(names, group, part.simulated)
    return attrs.evolve(world, axes=axes, group=connection.parts[_FOLDED])


# Process groups of a world's axes, and torch's record of them, a DeviceMesh.


def mesh_of(
    axes: Mapping[str, int], connection: Connection, device: torch.device
) -> DeviceMesh:
    """Return torch's DeviceMesh of the axes with accelfn's groups, created once.

    With other groups for the same ranks, ranks could wait for each other.
    """
    if connection.mesh is None:
        names = arithmetic.long(axes, tuple(axes))
        joins = [connection.parts.get((name,), connection) for name in names]
        ranks = dist.get_process_group_ranks(connection.group)
        sizes = [axes[name] for name in names]
        connection.mesh = DeviceMesh.from_group(
            [join.group for join in joins if join.group is not None],
            device.type,
            mesh=torch.tensor(ranks).view(sizes),
            mesh_dim_names=names,
        )
    return connection.mesh


# Opening the world that a launcher describes: a place, a device, axes, and a connection.


_CALL = "World.from_env"
_ALONE = Place(launcher="none")


def open_world(
    env: Environment,
    *,
    timeout: float,
    backend: str | None,
    device: str | torch.device | None,
    axes: Mapping[str, int] | None,
) -> tuple[Place, torch.device, Mapping[str, int], Connection]:
    """Join the ranks that the environment describes; the arguments are those of `from_env`.

    Returns:
        This process's place, the device for its tensors, the sizes of the world's axes by name,
        and the connection of the ranks. The place is that of a single process without a
        launcher, and until the other ranks let this process in.

    Raises:
        ArgumentError, WorldError, PeerFailedError: as `from_env`.
    """
    check_seconds(_CALL, "timeout", timeout)
    check_backend(backend)
    place = read_place(env)
    size = 1 if place is None else place.size
    sizes = arithmetic.choose_axes(_CALL, axes, env.get(arithmetic.VARIABLE), size)
    if place is None or place.is_alone:
        refuse_open_group()
        chosen = choose_device(device, local_rank=0)
        return _ALONE, chosen, sizes, Connection(None)
    chosen = choose_device(device, local_rank=place.local_rank)
    regrouping = regrouping_of(
        env, place, backend=backend, device=chosen, timeout=timeout
    )
    if regrouping is not None and regrouping.is_newcomer:
        alone = Connection(None, regrouping=regrouping)
        return _ALONE, chosen, {}, alone
    with Meeting(place, timeout) as meeting:
        connection, is_ours = join(meeting, backend=backend, device=chosen)
        if is_ours:
            connection.own()
            connection.regrouping = regrouping
        if sizes:
            with explain_opening(place.rank, place.size, backend):
                groups = open_groups(sizes, place.rank, meeting.seconds_to_open)
            for names, group in groups.items():
                connection.add_part(names, group)
        if is_ours:
            _begin(connection, meeting.seconds_left)
    if meeting.opens_in_time:
        connection.set_timeout(timeout)
    return place, chosen, sizes, connection


def _begin(connection: Connection, timeout: float) -> None:
    """Wait for the ranks that are still joining; close the group if a rank fails to join."""
    roll_call = connection.roll_call
    assert roll_call is not None  # noqa: S101 - what is opened here has met at a store
    try:
        roll_call.begin(timeout)
    except PeerFailedError as error:
        connection.fail(error)
        connection.end()
        raise
