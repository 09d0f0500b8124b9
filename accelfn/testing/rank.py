# SPDX-License-Identifier: Apache-2.0
"""One rank of `run_processes`: a process that runs the programs that its caller sends.

Programs and results are sent by pickle. The caller raises an error if pickle cannot send a
program or a result.
"""

import gc
import io
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import threading
import time
import traceback
from contextlib import ExitStack
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from types import FunctionType
from typing import Any

import attrs
import torch
import torch.distributed as dist

from accelfn import World
from accelfn.errors import ArgumentError
from accelfn.plug import connection as connections
from accelfn.testing.simulation.ranks import Modes

_COLLECTIVE_SECONDS = 30.0


def pack(value: object) -> bytes:
    """Return a value as bytes for another process.

    Raises:
        ArgumentError: another process could not import or rebuild the value.
    """
    into = io.BytesIO()
    try:
        _Packer(into, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    except ArgumentError:
        raise
    except Exception as error:
        msg = f"pickle cannot send {value!r} to another process: {error}"
        raise ArgumentError(msg) from error
    return into.getvalue()


class _Packer(pickle.Pickler):
    """A pickler that raises for functions and classes that a rank cannot import."""

    def reducer_override(self, obj: object) -> Any:
        """Reject functions and classes that a rank cannot import; let pickle do the rest."""
        why = _unimportable(obj) if isinstance(obj, (FunctionType, type)) else None
        if why is not None:
            msg = (
                f"{why}, so another process cannot import it. Define it with `def` or `class`"
                " at the top level of a module, and pass the values that it needs as arguments"
                " or with functools.partial."
            )
            raise ArgumentError(msg)
        return NotImplemented


def _unimportable(named: FunctionType | type) -> str | None:
    """Return why another process cannot import a function or class, or None."""
    if "<lambda>" in named.__qualname__:
        return f"{named.__module__}.{named.__qualname__} is a lambda"
    if "<locals>" in named.__qualname__:
        return f"{named.__module__}.{named.__qualname__} is defined in a function"
    if named.__module__ == "__main__":
        return f"{named.__qualname__} is defined in the running script or session"
    return None


@attrs.frozen
class Surroundings:
    """The settings of the caller's process that each rank applies: by default, those of now."""

    directory: Path = attrs.field(factory=Path.cwd)
    import_path: tuple[str, ...] = attrs.field(factory=lambda: tuple(sys.path))
    environment: dict[str, str] = attrs.field(factory=os.environ.copy)  # noqa: TID251 - handed on
    modes: Modes = attrs.field(factory=Modes)
    dtype: torch.dtype = attrs.field(factory=torch.get_default_dtype)
    is_deterministic: bool = attrs.field(
        factory=torch.are_deterministic_algorithms_enabled
    )

    def enter(self, rank: int, size: int) -> ExitStack:
        """Apply the settings with this rank's variables; modes end with the returned stack."""
        os.chdir(self.directory)
        sys.path[:] = self.import_path
        place = {
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "0",  # not used, because the process group is already open
        }
        os.environ.clear()  # noqa: TID251 - as a launcher does
        os.environ.update(self.environment, **place)  # noqa: TID251
        torch.set_default_dtype(self.dtype)  # noqa: TID251 - the caller's
        torch.use_deterministic_algorithms(self.is_deterministic)
        return self.modes.enter()


@attrs.frozen
class Answer:
    """The outcome of a program on a rank: a pickled result, or the error and its time."""

    result: bytes = b""
    failure: str | None = None
    at: float = 0.0


def serve(rank: int, size: int, store: str, pipe: Pipe) -> None:
    """Run programs on this rank until the caller's process ends."""
    # ignore Ctrl-C here: the caller's process handles it, and then ends the ranks
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    watch = threading.Thread(target=_end_with_caller, args=(store,), daemon=True)
    watch.start()
    group: dist.ProcessGroup | None = None
    while True:
        try:
            message = pipe.recv_bytes()
        except EOFError:
            watch.join()
            return
        surroundings, program = pickle.loads(message)  # noqa: S301 - the caller's own
        try:
            with surroundings.enter(rank, size):
                group = _open(rank, size, store) if group is None else group
                answer = Answer(_result(rank, size, group, program))
        except BaseException:  # noqa: BLE001 - sent to the caller, which raises
            answer = Answer(failure=traceback.format_exc(), at=time.monotonic())
        pipe.send(answer)


def _end_with_caller(store: str) -> None:
    """End this process when the caller's process ends, even during a program."""
    caller = multiprocessing.parent_process()
    if caller is not None:
        caller.join()
    shutil.rmtree(Path(store).parent, ignore_errors=True)
    os._exit(1)


def _open(rank: int, size: int, store: str) -> dist.ProcessGroup | None:
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=_COLLECTIVE_SECONDS),
    )
    return dist.group.WORLD


def _result(
    rank: int, size: int, group: dist.ProcessGroup | None, program: bytes
) -> bytes:
    """Run a pickled program, and return its pickled result."""
    try:
        fn, args, axes = pickle.loads(program)  # noqa: S301 - the caller's own
        if not gc.get_freeze_count():
            gc.freeze()  # otherwise each garbage collection visits all imported modules
    except Exception as error:
        msg = (
            "run_processes: a rank cannot import the function or one of its arguments:"
            f" {error!r}. Is the module on sys.path?"
        )
        raise ArgumentError(msg) from error
    connection = connections.Connection(group)
    for names, part in _open_groups(rank, tuple(axes.items())).items():
        connection.add_part(names, part)
    world = World(
        rank=rank,
        size=size,
        local_rank=rank,
        local_size=size,
        axes=axes,
        group=connection,
    )
    try:
        return pack(fn(world, *args))
    finally:
        world.connection.close()


@cache
def _open_groups(rank: int, axes: tuple[tuple[str, int], ...]) -> connections.Groups:
    """Return the groups of axes. They stay open for the next program, as the world's does."""
    return connections.open_groups(dict(axes), rank, _COLLECTIVE_SECONDS)
