# SPDX-License-Identifier: Apache-2.0
"""Programs that fail, hang or look around, for the tests of `run_processes`."""

import os
import signal
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import accelfn as af
from tests.waiting import wait_until


def place(world: af.World) -> tuple[int, int, int]:
    """Return where the rank is, and the process that it is in."""
    return world.rank, world.size, os.getpid()


def total(world: af.World, values: torch.Tensor) -> torch.Tensor:
    """Return the sum over ranks of values times the rank's number from 1."""
    mine = values * (world.rank + 1)
    dist.all_reduce(mine, group=world.group)
    return mine


def surroundings(world: af.World) -> dict[str, Any]:
    """Return what a program finds around it."""
    single = torch.ones(2, 2, dtype=torch.float32)
    return {
        "place": world.rank,
        "directory": str(Path.cwd()),
        "variable": os.environ.get("ACCELFN_TEST"),
        "rank": os.environ.get("RANK"),
        "threads": torch.get_num_threads(),
        "dtype": torch.tensor(1.0).dtype,
        "grad": torch.is_grad_enabled(),
        "product": (single @ single).dtype,
        "world": af.World.from_env(device="cpu").rank,
    }


def rows_of_workers(world: af.World) -> list[int]:
    """Return what a DataLoader with a worker process of its own yields."""
    loader = torch.utils.data.DataLoader([world.rank, 2, 3], num_workers=1)
    return [int(row) for row in loader]


class BoomError(Exception):
    """Leaves a file when it is forgotten: then its rank knows when it was raised."""

    def __init__(self, left: Path) -> None:
        """Take the file."""
        super().__init__()
        self.left = left

    def __del__(self) -> None:
        """Leave it."""
        self.left.touch()


def raise_in_turn(world: af.World, first: int, folder: str) -> None:
    """Raise on one rank, and on the other when that one has raised."""
    left = Path(folder, str(first))
    if world.rank == first:
        raise BoomError(left)
    wait_until(left.exists)
    msg = f"boom on rank {world.rank}"
    raise ValueError(msg)


def raise_alone(world: af.World) -> None:
    """Raise on rank 0, for which the others wait without end."""
    if world.rank == 0:
        raise ValueError("boom on rank 0")
    threading.Event().wait()


def end(world: af.World, how: str) -> None:
    """End rank 1 while rank 0 waits for it."""
    if world.rank == 1:
        if how == "exit":
            os._exit(7)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier(group=world.group)


def send_too_much(world: af.World) -> None:
    """Broadcast more than the others expect, which Gloo answers with an abort."""
    dist.broadcast(torch.ones(3 - world.rank), src=0, group=world.group)
    dist.barrier(group=world.group)


def spin(world: af.World, folder: str) -> None:
    """Tell the process's id in a file, and never return."""
    (Path(folder) / str(world.rank)).write_text(str(os.getpid()))
    while True:
        pass


def unsendable(world: af.World) -> object:
    """Return what cannot be pickled."""
    return world.rank, threading.Lock()
