# SPDX-License-Identifier: Apache-2.0
"""`find_batch_size`: the largest batch that fits into memory, on all ranks.

A rank that runs out of memory leaves the others waiting in a collective that it will never
join. So each try has a process group of its own. The rank gives it up, which ends the
others' waiting, and all meet in the world's own group, which no try has used.
"""

import gc
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import attrs
import torch
import torch.distributed as dist

from accelfn.base import accelerator
from accelfn.base.arguments import check_integer
from accelfn.base.calling import called
from accelfn.collectives import all_gather, barrier, naming
from accelfn.collectives.agreed import check_world
from accelfn.collectives.missing import wake
from accelfn.errors import (
    ArgumentError,
    Error,
    OutOfMemoryError,
    PeerFailedError,
    WorldError,
)
from accelfn.world import World

R = TypeVar("R")
_LABEL = "find_batch_size"
_SIGNS = ("out of memory", "can't allocate memory", "not enough memory", "ALLOC_FAILED")
"""What torch's allocators, CUDA, cuBLAS and cuDNN say; the second and third are the CPU's."""


@called
def find_batch_size(fn: Callable[[int, World], R], start: int, world: World) -> R:
    """Return `fn(batch_size, world)` for the largest of start, start/2, ... that fits.

    `fn` is called anew for each batch size, so it creates its state and data inside, from
    the batch size and in the world that it is given: the same ranks, joined by a process
    group of this try's own. What it returns may go on to be used; its world is open as long as
    the outer one. Nothing of a try that failed is kept. Meanwhile torch's default group is the
    try's own, so packages that talk through it, as DeepSpeed does, take part.

    Out of memory is `torch.OutOfMemoryError`, `MemoryError`, and what the CPU's allocator,
    CUDA, cuBLAS and cuDNN raise for it. All other errors pass at once.

    Args:
        fn: takes a batch size and a `World`; what the batch size counts is its own affair.
        start: the first batch size, 1 or more, the same on all ranks.
        world: whose ranks agree.

    Law: the batch size is the largest `start // 2**k` for which no rank runs out of memory,
        the same on all ranks; a rank that does while others wait for it ends their waiting.

    Cost: a gather of two numbers a try, and in a world of several ranks a process group and a
        barrier a try.

    Raises:
        OutOfMemoryError: not even a batch size of 1 fits; the last error is its cause.
        PeerFailedError: another rank failed, and not for lack of memory.
        WorldError: several ranks are joined by NCCL, which cannot be left by one of them.
        ArgumentError: `start` is no positive integer, or differs between ranks.

    Example:
        >>> def train(batch_size, world):
        ...     if batch_size > 24:
        ...         raise MemoryError
        ...     return f"trained on {batch_size}"
        >>> find_batch_size(train, 64, World.single())
        'trained on 16'
    """
    if not callable(fn):
        msg = f"af.find_batch_size({fn!r}): expected a function fn(batch_size, world)."
        raise ArgumentError(msg)
    check_integer("af.find_batch_size", "start", start, 1)
    check_world("af.find_batch_size(fn, start, world)", world)
    _check_world(world, start)
    batch_size = start
    while True:
        tried = _tried(fn, batch_size, world)
        if tried.all_fit(world, batch_size):
            return tried.result[0]
        if batch_size == 1:
            msg = (
                f"af.find_batch_size: {_who(tried)} ran out of memory with a batch size of"
                f" 1, the last after {start}. Make the model or its samples smaller."
            )
            raise OutOfMemoryError(msg) from tried.error
        del tried
        _free(world)
        batch_size //= 2


@attrs.define
class _Try(Generic[R]):
    """What came of one batch size on this rank: a result in a list, or an error."""

    result: list[R]
    error: Exception | None
    give_up: Callable[[], None]

    def all_fit(self, world: World, batch_size: int) -> bool:
        """Agree on whether the batch size fits on all ranks; if not, let go of the result.

        Raises:
            PeerFailedError: some rank lost its connection, and none ran out of memory.
        """
        lost = isinstance(self.error, PeerFailedError)
        mine = torch.tensor(
            [self.error is not None and not lost, lost], device=world.device
        )
        flags = torch.stack(all_gather(mine.int(), world, label=_LABEL)).any(0)
        none_left, some_lost = flags.tolist()
        if not none_left and not some_lost:
            return True
        if self.result:
            self.result.clear()
            self.give_up()
        if none_left:
            return False
        msg = (
            f"Rank {world.rank} of {world.size}: a rank lost its connection while"
            f" af.find_batch_size tried a batch size of {batch_size}, and no rank ran out of"
            " memory. Look at the other ranks' output for the cause."
        )
        raise PeerFailedError(msg) from self.error


def _tried(fn: Callable[[int, World], R], batch_size: int, world: World) -> _Try[R]:
    """Call the function in a branch of the world; keep no frame of a call that failed."""
    branch, give_up = _branch(world)
    world.connection.is_lent = branch is not world
    try:
        if branch is world:
            result = fn(batch_size, world)
        else:
            with naming(_LABEL, branch), _standing_in(branch):
                result = fn(batch_size, branch)
    except Exception as error:
        if not isinstance(error, PeerFailedError) and not _is_out_of_memory(error):
            raise
        failure = error
    else:
        return _Try([result], None, give_up)
    finally:
        world.connection.is_lent = False
    _clear_frames(failure)
    give_up()
    return _Try([], failure, give_up)


def _is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    if not isinstance(error, RuntimeError) or isinstance(error, Error):
        return False
    return any(sign in str(error) for sign in _SIGNS)


def _clear_frames(error: BaseException) -> None:
    """Let go of what the functions that an error went through still refer to."""
    known: set[int] = set()
    behind: list[BaseException | None] = [error]
    while behind:
        each = behind.pop()
        if each is not None and id(each) not in known:
            known.add(id(each))
            traceback.clear_frames(each.__traceback__)
            behind += [each.__cause__, each.__context__]


def _free(world: World) -> None:
    """Give memory back, of objects too that refer to themselves."""
    gc.collect()
    accelerator.give_back_memory(world.device)


def _who(tried: _Try[R]) -> str:
    ours = tried.error is not None and not isinstance(tried.error, PeerFailedError)
    return "this rank" if ours else "another rank"


def _check_world(world: World, start: int) -> None:
    if world.size == 1:
        return
    _check_group(world)
    mine = torch.tensor([start], device=world.device)
    starts = [int(each) for each in all_gather(mine, world, label=_LABEL)]
    if len(set(starts)) > 1:
        msg = f"af.find_batch_size: start differs between ranks: {starts}."
        raise ArgumentError(msg)


def _check_group(world: World) -> None:
    """Refuse a world beside which torch cannot join the same ranks once more."""
    if world.axes:
        msg = (
            f"af.find_batch_size in a world of axes, {dict(world.axes)}: it tries sizes in a"
            " second group of all ranks, which has none. Find the batch size without axes."
        )
        raise WorldError(msg)
    simulated = world.connection.simulated
    is_whole = (
        world.group is dist.group.WORLD if simulated is None else simulated.is_whole
    )
    if not is_whole or world.connection.is_branch:
        msg = (
            f"af.find_batch_size in a world of {world.size} ranks that is a part of the job,"
            " or the world of another search: it needs the job's whole world, as"
            " World.from_env() gives it."
        )
        raise WorldError(msg)
    backend = world.connection.backend(world.device)
    if backend not in (None, "gloo"):
        msg = (
            f"af.find_batch_size in a world of {world.size} ranks joined by {backend}: a"
            " rank that runs out of memory cannot end the others' waiting there. Open the"
            " world with World.from_env(backend='gloo'), or find the batch size of one rank in"
            " a run of one process, without a launcher."
        )
        raise WorldError(msg)


def _backend(world: World) -> Any:
    group = world.group
    assert group is not None  # noqa: S101 - a world of several has one
    return group._get_backend(world.device)


def _branch(world: World) -> tuple[World, Callable[[], None]]:
    """Return the same ranks with a process group of their own, and what gives it up."""
    if world.size == 1:
        return world, _nothing
    simulated = world.connection.simulated
    make = _torch_branch if simulated is None else simulated.branch
    branch, give_up = make(world)
    world.connection.hold(branch.connection.close)
    return branch, give_up


def _torch_branch(world: World) -> tuple[World, Callable[[], None]]:
    timeout = _backend(world).options._timeout
    group = dist.new_group(timeout=timeout, backend="gloo")
    # a rank that gave it up while others join it still would break their joining
    barrier(world, label=_LABEL)
    branch = attrs.evolve(world, group=group)
    branch.connection.is_branch = True
    del group
    return branch, lambda: _leave(branch)


@contextmanager
def _standing_in(branch: World) -> Generator[None, None, None]:
    """Let a branch's group be torch's default one, through which packages talk, as DeepSpeed."""
    if branch.connection.simulated is not None:
        yield
        return
    before, dist.group.WORLD = dist.group.WORLD, branch.group
    try:
        yield
    finally:
        dist.group.WORLD = before


def _leave(branch: World) -> None:
    """Close a group's connections, which is what the other ranks notice.

    Gloo closes them, too, when nothing refers to the group any more; but DeepSpeed's engine
    does for ever, and DistributedDataParallel until it is collected.
    """
    group = branch.group
    wake(branch)
    branch.connection.close()
    gc.collect()
    dist.destroy_process_group(group)


def _nothing() -> None: ...
