# SPDX-License-Identifier: Apache-2.0
"""Worlds of fresh Gloo processes with a short timeout, for programs that may break them.

Every rank's outcome is kept: what it returned or raised, how its process ended and what
it said as it did.
"""

import os
import resource
import tempfile
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist

import accelfn as af
from tests.internals import Connection as WorldConnection
from tests.internals import RankProcess, open_groups
from tests.waiting import HANGS

COLLECTIVE_SECONDS = 2.0


@attrs.frozen
class Outcome:
    """How a program went on one rank.

    Attributes:
        how: "returned", "raised", "ended" or "hung".
        what: what it returned; the error's text; the exit code with the last words.
    """

    how: str
    what: Any = None


def outcomes(
    size: int, fn: Callable[[af.World], Any], axes: Mapping[str, int] | None = None
) -> list[Outcome]:
    """Run a program in a world of fresh processes, and return each rank's outcome."""
    args = (size, fn, axes or {})
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            RankProcess.start(_live, rank, folder, *args, name=f"fresh rank {rank}")
            for rank in range(size)
        ]
        try:
            return _outcomes(ranks, Path(folder))
        finally:
            for rank in ranks:
                rank.end()


def _outcomes(ranks: list[RankProcess], folder: Path) -> list[Outcome]:
    found: dict[int, Outcome] = {}
    ends_at = time.monotonic() + HANGS
    while len(found) < len(ranks) and (left := ends_at - time.monotonic()) > 0:
        awaited = {r.pipe: i for i, r in enumerate(ranks) if i not in found}
        for pipe in wait(list(awaited), left):
            i = awaited[pipe]
            try:
                found[i] = pipe.recv()
            except (EOFError, OSError):
                ranks[i].process.join(HANGS)
                last_words = (folder / f"{i}.txt").read_text()
                found[i] = Outcome("ended", (ranks[i].process.exitcode, last_words))
    return [found.get(i, Outcome("hung")) for i in range(len(ranks))]


def _live(
    rank: int,
    folder: str,
    size: int,
    fn: Callable[[af.World], Any],
    axes: Mapping[str, int],
    pipe: Connection,
) -> None:
    os.dup2(os.open(f"{folder}/{rank}.txt", os.O_WRONLY | os.O_CREAT), 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # aborts are expected
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", size)
    store.set(
        f"rank {rank} is up", ""
    )  # a busy machine may take its time until all are
    store.wait([f"rank {i} is up" for i in range(size)], timedelta(seconds=HANGS))
    dist.init_process_group(
        "gloo",
        store=store,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=COLLECTIVE_SECONDS),
    )
    connection = WorldConnection(dist.group.WORLD)
    for names, group in open_groups(axes, rank, COLLECTIVE_SECONDS).items():
        connection.add_part(names, group)
    world = af.World(rank=rank, size=size, axes=axes, group=connection)
    try:
        outcome = Outcome("returned", fn(world))
    except Exception as error:  # noqa: BLE001 - told to the parent
        outcome = Outcome("raised", f"{type(error).__name__}: {error}")
    pipe.send(outcome)
    pipe.poll(None)  # the others' connections to this rank stay until all have ended
