# SPDX-License-Identifier: Apache-2.0
"""Processes that save, and kill themselves at a chosen act: forked, for that takes little."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeAlias

import torch

import accelfn as af
from tests.internals import RankProcess
from tests.laws.disks import Disk, watched
from tests.laws.states import base, state_of
from tests.waiting import heard

Killing: TypeAlias = Callable[[Path, Path, int, bool, bool], int]
"""Saves in a folder, tells in a file what is saved, until an act, or behind it; async or not.

Returns the signal that ended it.
"""


@contextmanager
def killing() -> Iterator[Killing]:
    """Lend a process whose children save until they kill themselves."""
    process = RankProcess.start(_serve, name="forks processes that kill themselves")

    def kill(root, said, at, late, async_):
        process.pipe.send((root, said, at, late, async_))
        return int(heard(process.pipe))

    try:
        yield kill
    finally:
        process.end()


def _serve(pipe: Connection) -> None:
    torch.set_num_threads(1)
    base()  # what the children need is here before they are
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    while True:
        asked = pipe.recv()
        child = os.fork()
        if child == 0:
            try:
                _save(*asked)
            finally:
                os._exit(1)
        pipe.send(os.WTERMSIG(os.waitpid(child, 0)[1]))


def _save(root: Path, said: Path, at: int, late: bool, async_: bool) -> None:
    disk = Disk(root)

    def kill(_):
        os.kill(os.getpid(), signal.SIGKILL)

    (disk.after if late else disk.happens)[at] = kill
    with watched(disk), open(said, "a", encoding="utf-8") as told:  # noqa: PTH123
        store = af.CheckpointStore(root, keep=1, async_=async_)
        for step in range(max(store.steps, default=0) + 1, 100):
            store.save(state_of(step))
            store.wait()
            told.write(f"{step}\n")
            told.flush()
