# SPDX-License-Identifier: Apache-2.0
"""The world: which rank this is, of how many, on which device, talking through what.

A `World` is passed, never looked up. This is the one file that reads the environment.
"""

import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import cached_property
from types import TracebackType
from typing import Any, Self, TypeAlias

import attrs
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from accelfn.base.arguments import check_seconds, explain_call_errors, is_integer
from accelfn.base.devices import choose_device, parse_device
from accelfn.base.hints import hint_attributes
from accelfn.errors import ArgumentError, PeerFailedError, WorldError
from accelfn.world import axes as arithmetic
from accelfn.world.connection import Connection
from accelfn.world.meeting import (
    Meeting,
    check_backend,
    explain_opening,
    join,
    refuse_open_group,
    regrouping_of,
)
from accelfn.world.place import Environment, Place, read_place


def _connection_of(group: "dist.ProcessGroup | Connection | None") -> Connection:
    """Return what joins the ranks: that of another world, or a new one."""
    return group if isinstance(group, Connection) else Connection(group)


@explain_call_errors
@hint_attributes("setattr")
@attrs.frozen(kw_only=True, eq=False)
class World:
    """One rank's place among all ranks of a job.

    Attributes:
        rank: this process, 0 to `size - 1`.
        size: how many processes train together.
        local_rank: this process among those of its machine.
        local_size: how many processes its machine runs.
        node_rank: its machine.
        device: where its tensors live.
        checked: whether ranks compare each of accelfn's collectives before they make it.
        axes: the sizes of its axes by name, outermost first; empty where it has none.
        connection: holds the torch process group, `group`, until the world is closed, and
            notes what this rank is doing, for errors.

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
        """Refuse a rank outside its world and a world of many without a group."""
        for name in ("rank", "size", "local_rank", "local_size", "node_rank"):
            if not is_integer(getattr(self, name)):
                msg = f"World({name}={getattr(self, name)!r}): expected an integer."
                raise WorldError(msg)
        least = {"size": 1, "local_rank": 0, "local_size": 1, "node_rank": 0}
        for name, first in least.items():
            if getattr(self, name) < first:
                msg = f"World({name}={getattr(self, name)}): expected at least {first}."
                raise WorldError(msg)
        if not 0 <= self.rank < self.size:
            msg = (
                f"World(rank={self.rank}, size={self.size}): the rank must be 0 to"
                f" {self.size - 1}."
            )
            raise WorldError(msg)
        if self.size > 1 and self.connection.group is None:
            msg = (
                f"World(size={self.size}) needs a process group: use World.from_env()."
            )
            raise WorldError(msg)

        if self.axes:
            sizes = arithmetic.resolve_axes("World", self.axes, self.size)
            object.__setattr__(self, "axes", sizes)
            if set(arithmetic.neighbor_runs(sizes)) - self.connection.parts.keys():
                msg = (
                    f"World(axes={sizes}) needs a process group for each axis: use"
                    " World.from_env(axes=...)."
                )
                raise WorldError(msg)

    @classmethod
    def single(cls, *, device: str | torch.device | None = None) -> Self:
        """Return the world of one process, without a process group.

        Args:
            device: "cpu", or any of torch.accelerator: "cuda", "xpu", "mps", "npu", ...; default
                its first where torch sees one, else the CPU.

        Raises:
            WorldError: the environment asks for more than one process, this is a simulated
                rank, or the device is not there.
        """
        # here and below, not above: importing accelfn is to cost little
        from accelfn.world.place import asked_size  # noqa: PLC0415

        name, size = asked_size(os.environ)
        if size > 1:
            msg = (
                f"{name} is {size}, but a world of 1 was asked for; {size} ranks"
                " would each train alone. Use af.World.from_env() and pass the"
                " world on."
            )
            raise WorldError(msg)
        if dist.is_initialized():
            from accelfn.world.meeting import refuse_open_group  # noqa: PLC0415

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

        That is torchrun or `accelfn launch` (`RANK`, `WORLD_SIZE`, …), else mpirun
        (`OMPI_COMM_WORLD_RANK`, `PMI_RANK`, …), else srun (`SLURM_PROCID`, …). Without any
        this is the world of a single process. With one, the process group is opened (and set
        as torch's default, which SyncBatchNorm and others read) and closed when the `with`
        block ends, or with the interpreter. A group that is open already is used and left
        open. Under `accelfn launch --elastic` a process that was started in the place of one
        that is gone has a world of its own, until `af.regroup` lets it into that of the others.

        Args:
            timeout: seconds after which a collective that some rank does not join fails. All
                ranks must have met within as many seconds of their start, so give the slowest
                of them time to import torch. After 10 s a rank says for whom it waits.
            backend: of torch.distributed; default "gloo" on CPU, elsewhere the one that torch
                has for the device, beside gloo: "cpu:gloo,cuda:nccl".
            device: "cpu", or any of torch.accelerator: "cuda", "xpu", "mps", "npu", ...; default
                that of the local rank where torch sees some, else the CPU.
            checked: whether ranks compare what they are about to do before each of accelfn's
                collectives, so that a mismatch is a `CollectiveMismatchError` on all of them
                and no hang, abort or wrong number. It costs a gather of 8 bytes a call. What
                `wrap_ddp` and `wrap_fsdp` send is torch's own and not compared.
            axes: how the ranks share the work, as sizes by name: "dp_replicate" copies of the
                model, each split over "dp_shard" ranks; "cp" parts of one sequence; "tp" parts
                of one layer. The last is the densest, whatever the order here; -1 is what is
                left. Default: those of `accelfn launch --axes` (`ACCELFN_AXES`), else none, and
                all ranks have copies, or parts of one with `wrap_fsdp`.

        Raises:
            ArgumentError: the axes do not multiply to the world's size, or are not the
                launcher's, or an argument is none.
            WorldError: a variable is missing, malformed or contradicts another, or the
                backend or the device cannot be had. Nothing falls back in silence.
            PeerFailedError: another rank came, and ended before all were joined.
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
        """Return the world in which ranks that met anew go on; it closes with this one."""
        met = attrs.evolve(
            self,
            rank=rank,
            size=size,
            local_rank=rank,
            local_size=size,
            group=connection,
        )
        self.connection.successor = met
        if size > 1 and connection.simulated is None:
            connection.own()
        return met

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which prints and writes for all."""
        return self.rank == 0

    def along(self, *names: str) -> "World":
        """Return the ranks that differ from this one in these axes only, as a world.

        Every collective takes it, and `print_once`, `barrier` and the rest: its `rank` and
        `size` are those along the axes. An axis that this world does not have is of one rank.

        Args:
            names: of axes, one or several that are neighbours.

        Raises:
            ArgumentError: a name is none of an axis, or the axes are no neighbours.
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
                f"World.along({', '.join(map(repr, names))}): between these axes stands"
                f" another of several ranks; the axes are {dict(self.axes)}, outermost first."
            )
            raise ArgumentError(msg)
        if part is None:
            part = Connection(None, activity=self.connection.activity)
        axes = {name: self.axes[name] for name in chosen}
        return self._part(ranks, part, axes=axes)

    def split(self, *, size: int | None = None, by: str | None = None) -> "World":
        """Return the part of the world in which this rank is, as a world of its own.

        Every collective takes it, and a state may be trained in it; its ranks meet one another
        alone. It has no axes, and closes with the whole. Call it on all ranks: the first time
        it opens process groups.

        Args:
            size: parts of so many neighbouring ranks; it divides the number of all.
            by: "node": the ranks of one machine.

        Raises:
            ArgumentError: neither or both are given, or the size divides the ranks unequally.
            WorldError: this is a part of a world itself, and others would not know of its parts.

        Law: reduced within parts, then `across` them, is reduced over all.

        Cost: the first time a process group for each part; by="node" each time gathers 8 bytes.
        """
        return self._parted("World.split", size, by)

    def across(self, *, size: int | None = None, by: str | None = None) -> "World":
        """Return the ranks that stand where this one stands in each part of `split`, as a world.

        By size its `rank` is the number of the part. Arguments, errors and cost are those of
        `split`.

        Raises:
            WorldError: machines run different numbers of ranks; and as `split`.
        """
        return self._parted("World.across", size, by)

    def _parted(self, call: str, size: int | None, by: str | None) -> "World":

        written = check_given(call, size, by, self.size)
        if self._whole is not None:
            msg = f"{written}: this is a part of a world. Split the whole: world.whole."
            raise WorldError(msg)
        assert self.group is not None or self.size == 1  # noqa: S101 - it raises if closed
        place = self.connection, self.device
        if size is None:
            rows = of_nodes(nodes_of(self.node_rank, *place, size=self.size))
        else:
            rows = of_size(size, self.size)
        if call == "World.across":
            rows = across(written, rows)
        joins = open_part(written, rows, self.rank, *place)
        (mine,) = (row for row in rows if self.rank in row)
        return self._part(mine, joins, axes={})

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
        """The ranks that share a batch out among them: those along the two axes of data."""
        return self.along(*arithmetic.BATCH) if self.axes else self

    @cached_property
    def loss(self) -> "World":
        """The ranks whose losses are parts of one: those of `batch`, and along "cp"."""
        return self.along(*arithmetic.LOSS) if self.axes else self

    @property
    def whole(self) -> "World":
        """The world of all ranks, of which this one may be a part."""
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
            way = (
                "use it inside its `with` block."
                if self.connection.successor is None
                else "its ranks met anew, in af.regroup: use the world of the state that it"
                " gave, state.world."
            )
            msg = f"The world of {self.size} ranks is closed; {way}"
            raise WorldError(msg)
        self.connection.check_not_lent()
        return self.connection.group

    def close(self) -> None:
        """Close the process group, if `from_env` opened it; twice is once.

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
        """Close what was opened.

        After an exception this waits for the interpreter's end: closing is what the
        other ranks notice, and this rank's traceback must be printed before theirs.
        """
        if error is None:
            self.close()
        else:
            self.connection.fail(error)


# Parts of a world: neighbours, or the ranks of a machine, and those at one place in each
# part.


Rows: TypeAlias = list[tuple[int, ...]]
"""All parts of a world, each the ranks that it has, in ascending order."""


def check_given(call: str, size: int | None, by: str | None, num_ranks: int) -> str:
    """Return a call as it was written, once it says in one way how to divide so many ranks.

    Raises:
        ArgumentError: it says so in two ways or in none, or the size is none or does not divide
            them.
    """
    if (size is None) is (by is None):
        msg = f'{call}: expected either size=, a number of ranks, or by="node".'
        raise ArgumentError(msg)
    written = f"{call}(by={by!r})" if size is None else f"{call}(size={size!r})"
    if size is None and by != "node":
        msg = f'{written}: expected by="node", the ranks of one machine.'
        raise ArgumentError(msg)
    if size is not None and not is_integer(size, 1):
        msg = f"{written}: expected a number of ranks, 1 or more."
        raise ArgumentError(msg)
    if size is not None and num_ranks % size:
        divisors = [n for n in range(1, num_ranks + 1) if num_ranks % n == 0]
        msg = (
            f"{written}: a world of {num_ranks} ranks has no equal parts of {size}. Take"
            f" {', '.join(map(str, divisors[:-1]))} or {divisors[-1]}."
        ).replace("Take  or", "Take")
        raise ArgumentError(msg)
    return written


def of_size(size: int, num_ranks: int) -> Rows:
    """Return parts of so many neighbours."""
    return [tuple(range(at, at + size)) for at in range(0, num_ranks, size)]


def of_nodes(nodes: Sequence[int]) -> Rows:
    """Return the ranks of each machine, of which each rank names its own."""
    found: dict[int, list[int]] = {}
    for rank, node in enumerate(nodes):
        found.setdefault(node, []).append(rank)
    return [tuple(ranks) for ranks in found.values()]


def across(written: str, rows: Rows) -> Rows:
    """Return the ranks that stand at one place in each part.

    Raises:
        WorldError: parts have not as many ranks.
    """
    sizes = [len(row) for row in rows]
    if len(set(sizes)) > 1:
        msg = (
            f"{written}: machines have {', '.join(map(str, sizes[:-1]))} and {sizes[-1]} ranks,"
            " so that not each rank has one at its place on every other. Start as many on each."
        )
        raise WorldError(msg)
    return [tuple(sorted(each)) for each in zip(*rows, strict=True)]


def nodes_of(
    node: int, connection: Connection, device: torch.device, *, size: int
) -> list[int]:
    """Return the machine of each rank; a collective of 8 bytes a rank."""
    if size == 1:
        return [node]
    mine = torch.tensor([node], device=device)
    found = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(found, mine, group=connection.group)
    return [int(each) for each in found]


def open_part(
    written: str, rows: Rows, rank: int, connection: Connection, device: torch.device
) -> Connection:
    """Return what joins the ranks of a rank's part; all ranks open all parts, once."""
    name = written.removeprefix("World.")
    (mine,) = (row for row in rows if rank in row)
    if len(rows) == 1:
        return connection
    if (name,) not in connection.parts:
        if connection.simulated is None:
            group, simulated = _open_groups(name, rows, mine, connection, device), None
        elif len(mine) > 1:
            group, simulated = connection.simulated.part(name, mine)
        else:
            group = simulated = None
        connection.add_part((name,), group, simulated)
        connection.parts[name,].parts = {}
    return connection.parts[name,]


def _open_groups(
    name: str,
    rows: Rows,
    mine: tuple[int, ...],
    connection: Connection,
    device: torch.device,
) -> Any:
    """Open the groups of all parts of several ranks, in one order, and return this rank's."""
    everyone = dist.get_process_group_ranks(connection.group)
    seconds = connection.timeout(device)
    timeout = None if seconds is None else timedelta(seconds=seconds)
    opened: dict[tuple[int, ...], Any] = {
        row: dist.new_group([everyone[i] for i in row], timeout, group_desc=name)
        for row in rows
        if len(row) > 1
    }
    return opened.get(mine)


# The ranks that a model is split over: gradients along "cp" are summed as along "dp_shard".


_FOLDED = ("dp_shard x cp",)


def fold_axes(world: World) -> World:
    """Return the ranks that a model may be split over, along the axes of splitting.

    Without axes they all share one copy; those along "cp" count to "dp_shard".
    """
    if not world.axes:
        return attrs.evolve(world, axes={"dp_shard": world.loss.size})
    axes = arithmetic.fold_cp(world.axes)
    if axes == world.axes:
        return world
    connection = world.connection
    if _FOLDED not in connection.parts:
        connection.add_part(_FOLDED, _group(connection), connection.simulated)
        whole = connection.parts[_FOLDED]
        whole.parts = {}
        for names in arithmetic.neighbor_runs(axes):
            inner = (*names, "cp") if "dp_shard" in names else names
            part = connection.parts[arithmetic.long(world.axes, inner)]
            whole.add_part(names, _group(part), part.simulated)
    return attrs.evolve(world, axes=axes, group=connection.parts[_FOLDED])


def _group(connection: Connection) -> Any:
    return connection.group


# Process groups of a world's axes, and torch's record of them, a DeviceMesh.


Groups: TypeAlias = dict[tuple[str, ...], dist.ProcessGroup]


def open_groups(axes: Mapping[str, int], rank: int, timeout: float) -> Groups:
    """Open the groups of all runs of neighbouring axes, and return those of this rank.

    All ranks open all groups, in one order.
    """
    groups: Groups = {}
    for names in arithmetic.neighbor_runs(axes):
        for ranks in arithmetic.rows(axes, names):
            group: Any = dist.new_group(
                ranks,
                timeout=timedelta(seconds=timeout),
                group_desc=" x ".join(names),
            )
            if rank in ranks:
                groups[names] = group
    return groups


def mesh_of(
    axes: Mapping[str, int], connection: Connection, device: torch.device
) -> DeviceMesh:
    """Return torch's record of the axes, with accelfn's own groups; made once.

    Two meshes of the same ranks with other groups would let ranks wait for one another.
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


# Opening the world that a launcher describes: a place, a device, axes, and what joins
# ranks.


_CALL = "World.from_env"
_ALONE = Place(launcher="none", rank=0, size=1, local_rank=0, local_size=1, node_rank=0)


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
        This process's place, which is that of one process where no launcher has started it,
        or where the others have yet to let it in; the device for its tensors; the sizes of
        the world's axes by name; and what joins the ranks.

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
    """Wait for the ranks that are still being joined; close the group if one never is."""
    roll_call = connection.roll_call
    assert roll_call is not None  # noqa: S101 - what is opened here has met at a store
    try:
        roll_call.begin(timeout)
    except PeerFailedError as error:
        connection.fail(error)
        connection.end()
        raise
