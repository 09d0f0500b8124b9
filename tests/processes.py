# SPDX-License-Identifier: Apache-2.0
"""Real Gloo ranks for tests: a pool of processes that stays open between tests.

A process costs seconds to import torch; the pool pays that once, in a forkserver that has
it imported already, and a program on an open world costs milliseconds.
"""

import atexit
import multiprocessing
import os
import socket
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

_PRELOAD = ["torch", "torch.distributed", "torch._dynamo", "accelfn"]
_TIMEOUT_SECONDS = 60.0


class RankError(AssertionError):
    """A program failed on a rank; the text is that rank's traceback."""


def run_ranks(size: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Run `fn(world, *args)` on every rank of a Gloo world; return the results in rank order.

    `fn` is a function of an importable module. What it returns travels by pickle. A failing
    rank ends the pool of this size: the next call starts a new one.
    """
    pool = _POOLS.get(size)
    if pool is None:
        pool = _POOLS[size] = _Pool(size)
    try:
        return pool.run(fn, args)
    except BaseException:
        _POOLS.pop(size).close()
        raise


class _Pool:
    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOAD)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, size, port, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
        for pipe in self._pipes:
            pipe.send((fn, args))
        results: dict[int, Any] = {}
        while len(results) < len(self._pipes):
            waiting = [p for i, p in enumerate(self._pipes) if i not in results]
            ready = wait(waiting, timeout=_TIMEOUT_SECONDS)
            if not ready:
                late = [i for i in range(len(self._pipes)) if i not in results]
                msg = f"ranks {late} did not answer within {_TIMEOUT_SECONDS:.0f} s"
                raise RankError(msg)
            failed: list[str] = []
            for pipe in ready:
                rank = self._pipes.index(pipe)
                try:
                    ok, value = pipe.recv()
                except EOFError:
                    ok, value = False, "the process ended"
                results[rank] = value
                if not ok:
                    failed.append(f"rank {rank}: {value}")
            if failed:
                raise RankError("\n".join(failed))
        return [results[rank] for rank in range(len(self._pipes))]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()


_POOLS: dict[int, _Pool] = {}


@atexit.register
def _close_pools() -> None:
    for pool in _POOLS.values():
        pool.close()


def _serve(rank: int, size: int, port: int, pipe: Connection) -> None:
    """Open a world, and run programs in it until the parent goes away."""
    import torch

    import accelfn as af

    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    torch.set_num_threads(1)
    os.chdir(tempfile.gettempdir())
    world = af.World.from_env(timeout=30.0, device="cpu")
    while True:
        try:
            fn, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, fn(world, *args)))
        except BaseException:  # noqa: BLE001 - everything goes to the parent
            pipe.send((False, traceback.format_exc()))
