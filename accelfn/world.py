# SPDX-License-Identifier: Apache-2.0
"""The world: which rank this is, of how many, on which device, talking through what.

A `World` is passed, never looked up. This is the one file that reads the environment.
"""

import atexit
import gc
import os
import sys
import weakref
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import Self

import attrs
import torch
import torch.distributed as dist

from accelfn.errors import ArgumentError, WorldError
from accelfn.place import Place, asked_size, read_place

_LONGEST = 10.0**9
"""Seconds; what a timedelta can hold, and 31 years."""


class Connection:
    """What joins the ranks, until the world is closed.

    torch aborts a process in which a Gloo group is still referred to at its end, so a world
    must be able to let go of it, and tell those who hold it too.

    `label` and `step` say what this rank is doing, and `trail` what it did before, for errors
    and the logs of simulations, which compare the `structure` of trees too, where the
    connection `tells_structure`. While `is_lent`, a branch of this world is in use, and the
    world itself must not be; `make_branch` makes one where torch cannot.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        """Take a process group, or None in a world of 1."""
        if group is not None and not isinstance(group, dist.ProcessGroup):
            msg = f"World(group={group!r}): expected a torch ProcessGroup or None."
            raise ArgumentError(msg)
        self.group = group
        self.is_closed = False
        self.is_lent = False
        self.make_branch: Callable[[World], tuple[World, Callable[[], None]]] | None
        self.make_branch = None
        self.label: str | None = None
        self.tells_structure = False
        self.structure: str | None = None
        self.step: int | None = None
        self.trail: deque[tuple[str, int | None]] = deque(maxlen=20)
        self._holders: list[weakref.WeakMethod[Callable[[], None]]] = []

    def hold(self, let_go: Callable[[], None]) -> None:
        """Have a bound method called when the world is closed."""
        self._holders.append(weakref.WeakMethod(let_go))

    def check_not_lent(self) -> None:
        """Raise while the ranks talk through a branch of the world.

        Raises:
            WorldError: they do.
        """
        if self.is_lent:
            msg = (
                "This world waits while af.find_batch_size tries a batch size: a rank that"
                " runs out of memory could not tell the others. Use the world that the"
                " function is given, fn(batch_size, world), and create states in there."
            )
            raise WorldError(msg)

    def close(self) -> None:
        """Let go of the group everywhere."""
        for holder in self._holders:
            let_go = holder()
            if let_go is not None:
                let_go()
        self._holders.clear()
        self.group, self.make_branch, self.is_closed = None, None, True


def _connected(group: "dist.ProcessGroup | Connection | None") -> Connection:
    """Return what joins the ranks: that of another world, or a new one."""
    return group if isinstance(group, Connection) else Connection(group)


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
        connection: holds the torch process group, `group`, until the world is closed.

    Use it as a context manager: leaving the block closes what `from_env` opened.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node_rank: int = 0
    device: torch.device = attrs.field(
        factory=lambda: torch.device("cpu"), converter=torch.device
    )
    checked: bool = False
    connection: Connection = attrs.field(
        default=None, alias="group", converter=_connected, repr=False
    )
    _owns_group: bool = attrs.field(default=False, repr=False, alias="owns_group")

    def __attrs_post_init__(self) -> None:
        """Refuse a rank outside its world and a world of many without a group."""
        if self.size < 1:
            msg = f"World(size={self.size}): expected at least 1."
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

    @classmethod
    def single(cls, *, device: str | torch.device | None = None) -> Self:
        """Return the world of one process, without a process group.

        Args:
            device: default the first GPU where torch sees one, else the CPU.

        Raises:
            WorldError: the environment asks for more than one process, or the device
                is not there.
        """
        name, size = asked_size(os.environ)
        if size > 1:
            msg = (
                f"{name} is {size}, but a world of 1 was asked for; {size} ranks"
                " would each train alone. Use af.World.from_env() and pass the"
                " world on."
            )
            raise WorldError(msg)
        return cls(device=_device(device, local_rank=0))

    @classmethod
    def from_env(
        cls,
        *,
        timeout: float = 300.0,
        backend: str | None = None,
        device: str | torch.device | None = None,
        checked: bool = False,
    ) -> Self:
        """Join the world that the launcher describes in the environment.

        That is torchrun or `accelfn launch` (`RANK`, `WORLD_SIZE`, …), else mpirun
        (`OMPI_COMM_WORLD_RANK`, `PMI_RANK`, …), else srun (`SLURM_PROCID`, …). Without any
        this is the world of a single process. With one, the process group is opened (and set
        as torch's default, which SyncBatchNorm and others read) and closed when the `with`
        block ends, or with the interpreter. A group that is open already is used and left
        open.

        Args:
            timeout: seconds after which a collective that some rank does not join fails.
            backend: of torch.distributed; default "gloo" on CPU, "cpu:gloo,cuda:nccl" on GPU.
            device: default the GPU of the local rank where torch sees GPUs, else the CPU.
            checked: whether ranks compare what they are about to do before each of accelfn's
                collectives, so that a mismatch is a `CollectiveMismatchError` on all of them
                and no hang, abort or wrong number. It costs a gather of 8 bytes a call. What
                DistributedDataParallel sends is torch's own and not compared.

        Raises:
            WorldError: a variable is missing, malformed or contradicts another, or the
                backend or the device cannot be had. Nothing falls back in silence.
        """
        if not isinstance(timeout, (int, float)) or not 0 < timeout < _LONGEST:
            msg = (
                f"World.from_env(timeout={timeout!r}): expected a positive number of"
                " seconds."
            )
            raise ArgumentError(msg)
        _check_backend(backend)
        place = read_place(os.environ)
        if place is None or place.is_alone:
            _refuse_open_group()
            return cls(device=_device(device, local_rank=0), checked=checked)
        chosen = _device(device, local_rank=place.local_rank)
        group, owned = _join(place, backend=backend, device=chosen, timeout=timeout)
        world = cls(
            rank=place.rank,
            size=place.size,
            local_rank=place.local_rank,
            local_size=place.local_size,
            node_rank=place.node_rank,
            device=chosen,
            checked=checked,
            group=group,
            owns_group=owned,
        )
        if owned:  # torch may abort a process that leaves it open
            atexit.register(world._close_at_exit)
        return world

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which prints and writes for all."""
        return self.rank == 0

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The torch process group that joins the ranks; None in a world of 1.

        Raises:
            WorldError: the world is closed.
        """
        if self.connection.is_closed:
            msg = (
                f"The world of {self.size} ranks is closed; use it inside its `with`"
                " block."
            )
            raise WorldError(msg)
        self.connection.check_not_lent()
        return self.connection.group

    def close(self) -> None:
        """Close the process group, if `from_env` opened it; twice is once."""
        if not self._owns_group or self.connection.is_closed:
            return
        atexit.unregister(self._close_at_exit)
        ours = dist.is_initialized() and dist.group.WORLD is self.connection.group
        self.connection.close()
        # DistributedDataParallel refers to itself. It must be gone before the group is: its
        # reducer would free the group holding the interpreter's lock, which Gloo may want
        gc.collect()
        if ours:
            dist.destroy_process_group()

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
        if error is None or not self._owns_group:
            self.close()

    def _close_at_exit(self) -> None:
        """Close, and drop the traceback that was printed: its frames hold the group."""
        for name in ("last_exc", "last_value", "last_traceback"):
            if hasattr(sys, name):
                setattr(sys, name, None)
        self.close()


def _device(asked: str | torch.device | None, *, local_rank: int) -> torch.device:
    """Return the device asked for, or the local rank's GPU, or the CPU."""
    count = torch.cuda.device_count()
    if asked is None:
        if count == 0:
            return torch.device("cpu")
        asked = torch.device("cuda", local_rank)
    try:
        chosen = torch.device(asked)
    except (RuntimeError, TypeError) as error:
        msg = f"Device {asked!r} is none that torch knows: {error}"
        raise WorldError(msg) from error
    if chosen.type not in ("cpu", "cuda"):
        msg = f"Device {asked!r} cannot be trained on here; expected cpu or cuda."
        raise WorldError(msg)
    if chosen.type == "cuda":
        index = local_rank if chosen.index is None else chosen.index
        if index >= count:
            msg = (
                f"Device cuda:{index} was asked for (local rank {local_rank}), but"
                f" torch sees {count} GPUs. Start fewer ranks per machine, or pass"
                ' device="cpu".'
            )
            raise WorldError(msg)
        chosen = torch.device("cuda", index)
        torch.cuda.set_device(chosen)
    return chosen


def _check_backend(backend: str | None) -> None:
    """Refuse a backend that torch was not built with."""
    for part in [] if backend is None else backend.split(","):
        name = part.split(":")[-1]
        if not dist.is_backend_available(name):
            msg = (
                f"Backend {backend!r}: this torch has no {name!r}. Expected gloo, nccl or"
                ' one a device, such as "cpu:gloo,cuda:nccl".'
            )
            raise WorldError(msg)


def _refuse_open_group() -> None:
    """Raise where several ranks have met, and the environment does not say so."""
    if dist.is_initialized() and (size := dist.get_world_size()) > 1:
        msg = (
            f"The environment has no RANK, but torch's process group has {size} ranks:"
            " this is not a world of 1. Pass on the World that you were given (a"
            " simulated rank gets its own), or make one with World(rank=, size=, group=)."
        )
        raise WorldError(msg)


def _join(
    place: Place,
    *,
    backend: str | None,
    device: torch.device,
    timeout: float,
) -> tuple[dist.ProcessGroup, bool]:
    """Return the process group of all ranks, and whether it was opened here."""
    if dist.is_initialized():
        group = dist.group.WORLD
        if group is not None and (group.rank(), group.size()) == (
            place.rank,
            place.size,
        ):
            return group, False
        msg = (
            f"A process group is open in which this is rank {dist.get_rank()} of"
            f" {dist.get_world_size()}, but the environment says RANK={place.rank}"
            f" of WORLD_SIZE={place.size}. Close it with"
            " torch.distributed.destroy_process_group()."
        )
        raise WorldError(msg)
    if backend is None:
        backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    try:
        dist.init_process_group(
            backend,
            init_method=place.init_method,
            rank=place.rank,
            world_size=place.size,
            timeout=timedelta(seconds=timeout),
        )
    except (ValueError, RuntimeError) as error:
        msg = (
            f"Rank {place.rank} of {place.size} cannot open a {backend!r} process"
            f" group: {error}"
        )
        raise WorldError(msg) from error
    group = dist.group.WORLD
    if group is None:
        msg = f"torch opened no default group for backend {backend!r}."
        raise WorldError(msg)
    return group, True
