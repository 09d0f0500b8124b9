# SPDX-License-Identifier: Apache-2.0
"""The world: this process's rank, the number of ranks, its device and its process group.

A `World` is passed as an argument and never read from a global variable. Only this file reads
the environment variables.
"""

import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from types import TracebackType
from typing import Literal, Self, TypeAlias

import attrs
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from accelfn.base.arguments import (
    advise,
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
from accelfn.world.place import Place, asked_size, read_place

_CALL = "World.from_env"
_ALONE = Place(launcher="none")


def _why_not_alone(call: str) -> str | None:
    """Return what is wrong with a world of one process if a launcher started several."""
    name, size = asked_size(os.environ)
    if size == 1:
        return None
    return (
        f"{call} is for one process, but {name} is {size}: each of the {size} ranks would train"
        " alone. Write world = af.World.from_env() instead, and pass it to"
        " TrainState.create(world=world, ...)."
    )


def _connection_of(group: "dist.ProcessGroup | Connection | None") -> Connection:
    """Return a `Connection` as it is, or a new `Connection` with a process group."""
    if group is None and (text := _why_not_alone("World()")):
        advise(text)
    return group if isinstance(group, Connection) else Connection(group)


@explain_call_errors
@hint_attributes("setattr")
@attrs.frozen(kw_only=True, eq=False)
class World:
    """All ranks of a job, and the place of this process among them.

    Use a world as a context manager: the end of the `with` block closes the process group that
    `from_env` opened.

    Attributes:
        rank: the number of this process, from 0 to `size - 1`.
        size: the number of processes that train together.
        local_rank: the number of this process among the processes of its machine.
        local_size: the number of processes on its machine.
        node_rank: the number of its machine.
        device: the device of this rank's tensors.
        checked: whether ranks compare their calls before each collective of accelfn.
        axes: the sizes of the world's axes by name, outermost first; empty without axes.
        connection: internal. It has the torch process group, `group`, until the world is
            closed, and this rank's current operation, for errors.
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
        """Raise if a number is invalid, or if several ranks or axes have no process group."""
        least = {"size": 1, "local_rank": 0, "local_size": 1, "node_rank": 0, "rank": 0}
        for name, first in least.items():
            value = getattr(self, name)
            if not is_integer(value, first):
                msg = f"World({name}={value!r}): expected an integer, {first} or more."
                raise WorldError(msg)
        call = f"World(rank={self.rank}, size={self.size})"
        if self.rank >= self.size:
            msg = f"{call}: expected a rank from 0 to {self.size - 1}."
            raise WorldError(msg)
        if self.size > 1 and self.connection.group is None:
            msg = f"{call} needs a process group. Use World.from_env(), or pass group=."
            raise WorldError(msg)
        if self.axes:
            sizes = arithmetic.resolve_axes("World", self.axes, self.size)
            object.__setattr__(self, "axes", sizes)
            if set(arithmetic.neighbor_runs(sizes)) - self.connection.parts.keys():
                msg = f"World(axes={sizes}): write World.from_env(axes=...), to open groups."
                raise WorldError(msg)

    @classmethod
    def single(cls, *, device: str | torch.device | None = None) -> Self:
        """Create the world of a single process, without a process group.

        Args:
            device: "cpu", or an accelerator: "cuda", "xpu", "mps", "npu", ... Default: the
                first accelerator of this machine, or the CPU.

        Raises:
            WorldError: a launcher started several processes, this is a simulated rank, or the
                device does not exist.
        """
        if text := _why_not_alone("World.single()"):
            raise WorldError(text)
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
        """Create the world from the launcher's environment variables, and connect the ranks.

        The launcher is torchrun or `accelfn launch` (`RANK`, `WORLD_SIZE`, …), otherwise mpirun
        (`OMPI_COMM_WORLD_RANK`, `PMI_RANK`, …), otherwise srun (`SLURM_PROCID`, …). Without a
        launcher, the result is the world of a single process. With a launcher, accelfn opens
        torch's default process group, and closes it at the end of the `with` block, or when the
        interpreter exits. If a process group is already open, accelfn uses it and does not
        close it. Under `accelfn launch --elastic`, a process that replaces a failed process
        first gets a world of one rank. `af.regroup` then adds the process to the other ranks.

        Args:
            timeout: seconds after which a collective fails if a rank does not call it. All
                ranks must also connect within this time, so allow for the slowest rank to
                import torch. After 10 s a rank prints the ranks that it waits for.
            backend: a backend of torch.distributed. Default: "gloo" on the CPU; on other devices
                torch's default backend together with gloo, such as "cpu:gloo,cuda:nccl".
            device: "cpu", or an accelerator: "cuda", "xpu", "mps", "npu", ... Default: the
                accelerator with the number of the local rank, or the CPU.
            checked: whether ranks compare their calls before each collective of accelfn. A
                mismatch then raises `CollectiveMismatchError` on all ranks, instead of a hang,
                an abort or a wrong result. This costs a gather of 8 bytes per call. torch's
                collectives in `wrap_ddp` and `wrap_fsdp` are not compared.
            axes: how the ranks share the work, as sizes by name: "dp_replicate" for copies of
                the model, "dp_shard" for the ranks that share one copy, "cp" for parts of a
                sequence, and "tp" for parts of a layer. The order is fixed, and the last axis is
                innermost. A size of -1 means the remaining ranks. Default: the axes of
                `accelfn launch --axes` (`ACCELFN_AXES`). Without axes, every rank has a copy of
                the model, or with `wrap_fsdp` a shard of one copy.

        Raises:
            ArgumentError: an argument is invalid, the product of the axes is not the number of
                ranks, or the axes differ from those of the launcher.
            WorldError: a variable is missing, malformed or contradicts another, or the backend
                or the device does not exist. accelfn never uses a fallback silently.
            PeerFailedError: another rank ended before all ranks were connected.
        """
        check_seconds(_CALL, "timeout", timeout)
        check_backend(backend)
        place = read_place(os.environ) or _ALONE
        text = os.environ.get(arithmetic.VARIABLE)
        sizes = arithmetic.choose_axes(_CALL, axes, text, place.size)
        if place.is_alone:
            refuse_open_group()
        own_device = choose_device(device, local_rank=place.local_rank)
        connection = _connect(place, own_device, sizes, backend, timeout)
        if connection.group is None:
            place = _ALONE
            sizes = {} if connection.regrouping else sizes  # none before `af.regroup`
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
        """Return the world after a regrouping. Closing this world also closes that world."""
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
        """Whether this is rank 0, which prints and writes files for all ranks."""
        return self.rank == 0

    def along(self, *names: str) -> "World":
        """Return a world of the ranks that differ from this rank only along some axes.

        You can pass the result to every collective, and to `print_once` and `barrier`. Its
        `rank` and `size` count only these ranks. An axis that this world does not have
        has size 1.

        Args:
            names: the name of an axis, or the names of several neighboring axes.

        Raises:
            ArgumentError: a name is not the name of an axis in accelfn, or the axes are not
            neighbors.
        """
        for name in names:
            arithmetic.check_name("World.along", name)
        chosen = arithmetic.long(self.axes, names)
        if chosen == arithmetic.long(self.axes) and (chosen or self.size == 1):
            return self
        ranks = arithmetic.row(self.axes, chosen, self.rank)
        part = self.connection.parts.get(chosen)
        if part is None:
            if len(ranks) > 1:
                msg = (
                    f"World.along({', '.join(map(repr, names))}): expected neighboring axes;"
                    f" the axes are {dict(self.axes)}, outermost first."
                )
                raise ArgumentError(msg)
            part = Connection(None, activity=self.connection.activity)
        axes = {name: self.axes[name] for name in chosen}
        return self._part(ranks, part, axes=axes)

    def split(
        self, *, size: int | None = None, by: Literal["node"] | None = None
    ) -> "World":
        """Split the world into parts, and return this rank's part as a world.

        You can pass a part to every collective, and train a state in it. A part has no axes, and
        is closed with the whole world. Call `split` on all ranks, because the first call opens
        process groups.

        Args:
            size: the number of consecutive ranks in a part, a divisor of the world's size.
            by: "node" puts the ranks of one machine into a part.

        Raises:
            ArgumentError: neither or both arguments are passed, or `size` does not divide the
                number of ranks.
            WorldError: this world is itself a part.

        Law: a reduction within the parts, and then over `across`, is equal to a reduction over
            all ranks.

        Cost: the first call opens a process group per part. With by="node", each call gathers
            8 bytes per rank.
        """
        return self._split_world("World.split", size, by)

    def across(
        self, *, size: int | None = None, by: Literal["node"] | None = None
    ) -> "World":
        """Return a world with the ranks that have this rank's position in the parts of `split`.

        With `size`, the `rank` in the result is the number of this rank's part. Arguments and
        cost are the same as for `split`.

        Raises:
            ArgumentError: in the same cases as `split`.
            WorldError: machines run different numbers of ranks, or this world is itself a part.
        """
        return self._split_world("World.across", size, by)

    def _split_world(self, call: str, size: int | None, by: str | None) -> "World":
        usage = check_given(call, size, by, self.size)
        if self._whole is not None:
            msg = f"{usage}: this world is itself a part. Split world.whole instead."
            raise WorldError(msg)
        assert self.group is not None or self.size == 1  # noqa: S101 - `group` raises if closed
        rows = self._rows_by_node() if size is None else of_size(size, self.size)
        if call == "World.across":
            rows = across(usage, rows)
        (ranks,) = (row for row in rows if self.rank in row)
        part = self._open_part(usage.removeprefix("World."), rows, ranks)
        return self._part(ranks, part, axes={})

    def _open_part(self, name: str, rows: "Rows", ranks: tuple[int, ...]) -> Connection:
        """Return the connection of this rank's part; the first call opens all parts' groups."""
        connection = self.connection
        if len(rows) == 1:
            return connection
        if (name,) not in connection.parts:
            group = simulation = None
            if connection.simulated is None:
                everyone = dist.get_process_group_ranks(connection.group)
                of_run = [tuple(everyone[rank] for rank in row) for row in rows]
                seconds = connection.timeout(self.device)
                group = open_rows(of_run, of_run[rows.index(ranks)][0], seconds, name)
            elif len(ranks) > 1:
                group, simulation = connection.simulated.part(name, ranks)
            connection.add_part((name,), group, simulation).parts = {}
        return connection.parts[name,]

    def _rows_by_node(self) -> "Rows":
        """Gather the machine number of every rank, and return the ranks of each machine."""
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
        """The ranks that share a batch: those along "dp_replicate" and "dp_shard", as a world."""
        return self.along(*arithmetic.BATCH) if self.axes else self

    @cached_property
    def loss(self) -> "World":
        """The ranks that share a loss: those along "dp_replicate", "dp_shard" and "cp"."""
        return self.along(*arithmetic.LOSS) if self.axes else self

    @property
    def whole(self) -> "World":
        """The world of all ranks; the same as this world, unless this world is a part."""
        return self if self._whole is None else self._whole

    @property
    def mesh(self) -> "DeviceMesh":
        """The axes with several ranks as torch's DeviceMesh, for DTensors.

        Raises:
            WorldError: no axis has several ranks.
        """
        names = arithmetic.long(self.axes)
        if not names:
            msg = (
                "World.mesh: this world has no axis with several ranks. Start several ranks, and"
                ' create the world with axes: World.from_env(axes={"dp_shard": -1}).'
            )
            raise WorldError(msg)
        connection = self.connection
        if connection.mesh is None:
            ranks = dist.get_process_group_ranks(connection.group)
            joins = [connection.parts.get((name,), connection) for name in names]
            # with other process groups for the same ranks, collectives could deadlock
            connection.mesh = DeviceMesh.from_group(
                [join.group for join in joins if join.group is not None],
                self.device.type,
                mesh=torch.tensor(ranks).view([self.axes[name] for name in names]),
                mesh_dim_names=names,
            )
        return connection.mesh

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The torch process group of the ranks; None in a world of one rank.

        Raises:
            WorldError: the world is closed.
        """
        if self.connection.is_closed:
            advice = "use it inside its `with` block"
            if self.connection.successor is not None:
                advice = "af.regroup made a new world: use state.world of the new state"
            msg = f"The world of {self.size} ranks is closed; {advice}."
            raise WorldError(msg)
        self.connection.check_not_lent()
        return self.connection.group

    def close(self) -> None:
        """Close the process group if `from_env` opened it; a second call does nothing.

        For a part of a world, this does nothing: a part is closed with the whole world.
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

        After an exception, the group stays open until the interpreter exits. The other ranks
        fail when the group is closed, and this rank must print its traceback before that.
        """
        if error is None:
            self.close()
        else:
            self.connection.fail(error)


# Parts of a world (`split`): consecutive ranks, or the ranks of a machine. `across` has the
# ranks with the same position in each part.


Rows: TypeAlias = list[tuple[int, ...]]
"""The ranks of each part of a world, in ascending order."""


def check_given(call: str, size: int | None, by: str | None, num_ranks: int) -> str:
    """Check the arguments of `split` or `across`, and return the call as text, for errors.

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
    """Return parts of `size` consecutive ranks."""
    return [tuple(range(at, at + size)) for at in range(0, num_ranks, size)]


def across(usage: str, rows: Rows) -> Rows:
    """Return, for each position in a part, the ranks with this position.

    Raises:
        WorldError: parts have different numbers of ranks.
    """
    sizes = [len(row) for row in rows]
    if len(set(sizes)) > 1:
        counts = ", ".join(map(str, sizes))
        msg = f"{usage}: the machines have {counts} ranks. Start equally many on each machine."
        raise WorldError(msg)
    return [tuple(sorted(ranks)) for ranks in zip(*rows, strict=True)]


# The ranks that share one sharded copy of a model are the ranks along "cp" and "dp_shard",
# because gradients are summed along both axes.


_FOLDED = ("dp_shard x cp",)


def fold_axes(world: World) -> World:
    """Return the world with the axes that may shard a model: "cp" is merged into "dp_shard".

    If the world has no axes, the result has the axis "dp_shard" with all ranks.
    """
    if not world.axes:
        return attrs.evolve(world, axes={"dp_shard": world.loss.size})
    axes = arithmetic.fold_cp(world.axes)
    if axes == world.axes:
        return world
    connection = world.connection
    if _FOLDED not in connection.parts:
        parent = connection.add_part(_FOLDED, connection.group, connection.simulated)
        parent.parts = {}
        for names in arithmetic.neighbor_runs(axes):
            inner = (*names, "cp") if "dp_shard" in names else names
            part = connection.parts[arithmetic.long(world.axes, inner)]
            parent.add_part(names, part.group, part.simulated)
    return attrs.evolve(world, axes=axes, group=connection.parts[_FOLDED])


# Connect the ranks of the world that a launcher describes.


def _connect(
    place: Place,
    device: torch.device,
    axes: Mapping[str, int],
    backend: str | None,
    timeout: float,
) -> Connection:
    """Connect a process with the other ranks of its world, as `from_env` does.

    The connection has no group if the process has no launcher, or if it replaces a failed
    process and has not joined the others.
    """
    if place.is_alone:
        return Connection(None)
    regrouping = regrouping_of(
        os.environ, place, backend=backend, device=device, timeout=timeout
    )
    if regrouping is not None and regrouping.is_newcomer:
        return Connection(None, regrouping=regrouping)
    with Meeting(place, timeout) as meeting:
        connection = join(meeting, backend=backend, device=device)
        if connection.is_ours:
            connection.regrouping = regrouping
        with explain_opening(place.rank, place.size, backend):
            groups = open_groups(axes, place.rank, meeting.seconds_to_open)
        for names, group in groups.items():
            connection.add_part(names, group)
        if connection.is_ours:
            _begin(connection, meeting.seconds_left)
    if meeting.opens_in_time:
        connection.set_timeout(timeout)
    return connection


def _begin(connection: Connection, timeout: float) -> None:
    """Wait until all ranks have joined; if a rank fails to join, close the group and raise."""
    roll_call = connection.roll_call
    assert roll_call is not None  # noqa: S101 - a connection that accelfn opened has a store
    try:
        roll_call.begin(timeout)
    except PeerFailedError as error:
        connection.fail(error)
        connection.end()
        raise
