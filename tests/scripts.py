# SPDX-License-Identifier: Apache-2.0
"""Run scripts on ranks, as a launcher does, but in processes that have already imported torch.

A process needs 2.5 seconds to import torch, and a launched run of two ranks has three processes.
Here a fork server imports torch once. tests/ranks tests the launchers themselves.
"""

import os
import runpy
import sys
from collections.abc import Mapping
from pathlib import Path

import attrs
import torch

from tests.internals import RankProcess
from tests.ports import free_port
from tests.waiting import HANGS


@attrs.frozen
class Ran:
    """How a script ended: each rank's exit code, and what all ranks wrote, rank by rank."""

    codes: list[int | None]
    out: str
    err: str


def run_script(script: Path, folder: Path, size: int = 1, **variables: str) -> Ran:
    """Run a script as `python` does, or on two ranks and more as `accelfn launch` does.

    Args:
        script: its path.
        folder: the current directory that it gets.
        size: the number of ranks; one is a plain process.
        variables: more of its environment.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    port = str(free_port()) if size > 1 else ""
    files = [(folder / f"{r}.out.txt", folder / f"{r}.err.txt") for r in range(size)]
    ranks: list[RankProcess] = []
    try:
        for rank in range(size):
            place = _place(rank, size, port) if size > 1 else {}
            args = str(script), str(folder), environment | place, files[rank]
            started = RankProcess.start(_play, *args, name=f"{script.stem} {rank}")
            ranks.append(started)
        for rank in ranks:
            rank.process.join(HANGS)
        codes = [rank.process.exitcode for rank in ranks]
    finally:
        for rank in ranks:
            rank.end()
    out, err = (
        "".join(each.read_text(encoding="utf-8") for each in kind)
        for kind in zip(*files, strict=True)
    )
    return Ran(codes, out, err)


def _place(rank: int, size: int, port: str) -> dict[str, str]:
    numbers = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank}
    return {
        **{name: str(number) for name, number in numbers.items()},
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }


def _play(
    script: str,
    folder: str,
    environment: Mapping[str, str],
    files: tuple[Path, Path],
    _: object,
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for file, stream in zip(files, (sys.stdout, sys.stderr), strict=True):
        stream.flush()
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream.fileno())
    torch.set_num_threads(1)
    sys.argv = [script]
    sys.path[0] = str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")
    sys.stdout.flush()
