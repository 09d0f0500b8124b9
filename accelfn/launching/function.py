# SPDX-License-Identifier: Apache-2.0
"""`launch`: a function on several ranks, from a script or a notebook.

Ranks are new Python processes, and not forks of this one: a fork has this process's locks
without the threads that would let go of them, and can use no GPU that was used here. So the
function must travel. One of a module that ranks can import goes by its name; one of a notebook,
of the script that runs, or of another function goes by value, with what it refers to
(cloudpickle does both). It comes from this process, and goes to its own children. What ranks
return comes back as plain data and tensors.
"""

from __future__ import annotations

import json
import linecache
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate

import cloudpickle

from accelfn import codec
from accelfn.errors import ArgumentError, LaunchError, RankFailedError
from accelfn.launching.script import WORKER, run_here
from accelfn.place import asked_size

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from accelfn.launching.agent import Ended
    from accelfn.world import World

_RANK = str(Path(__file__).with_name("rank.py"))


def launch(
    fn: Callable[Concatenate[World, ...], Any],
    *args: Any,
    nproc: int = 2,
    device: str | torch.device | None = None,
    timeout: float = 300.0,
) -> list[Any]:
    """Run `fn(world, *args)` on every rank of a new world of processes, and return the results.

    It works in a script, which needs no `if __name__ == "__main__":` for it, and in Jupyter,
    Colab and Kaggle, where the function may be one of a cell. Ranks have this process's
    directory, import path and environment, and copies of what the function refers to; nothing
    that they do reaches this process but what they return and print. They share no memory with
    it: big data is better read in `fn` than passed to it.

    Args:
        fn: what each rank does. It gets its `World`.
        args: what it gets beside it.
        nproc: the number of ranks.
        device: as in `World.from_env`: default a GPU for each rank, or the CPU without any.
        timeout: as in `World.from_env`.

    Returns:
        What each rank returned, by rank: tensors, on the CPU, and plain data (strings, numbers,
        booleans, None, and dicts, lists and tuples of them).

    Law: this process is as it was: its random state, its modes, its default process group,
    its environment, its signal handlers.

    Cost: some 3 s to start Python and import torch.

    Raises:
        ArgumentError: `fn` or an argument cannot travel, or a number has no meaning.
        LaunchError: this process is a rank itself.
        RankFailedError: a rank failed; the text begins with the traceback of the first.

    Example:
        >>> launch(lambda world, x: x + world.rank, 10, nproc=2)
        [10, 11]
    """
    if isinstance(nproc, bool) or not isinstance(nproc, int) or nproc < 1:
        msg = f"af.launch(nproc={nproc!r}): expected a number of processes, 1 or more."
        raise ArgumentError(msg)
    name, size = asked_size(os.environ)
    if size > 1:
        msg = (
            f"af.launch: this process is one of {size} already ({name}={size}), and each"
            f" would start {nproc} more. Call the function itself, with"
            " af.World.from_env()."
        )
        raise LaunchError(msg)
    with tempfile.TemporaryDirectory(prefix="accelfn-call-") as name:
        folder = Path(name)
        _write_call(folder, fn, args, device=device, timeout=timeout)
        ended = _run(folder, nproc)
        if ended.failures:
            raise RankFailedError(ended.report)
        return [_result(folder, rank) for rank in range(nproc)]


def _write_call(
    folder: Path,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    *,
    device: str | torch.device | None,
    timeout: float,
) -> None:
    try:
        call = cloudpickle.dumps((fn, args))
    except Exception as error:
        msg = f"af.launch: {fn!r} or its arguments cannot travel to another process: {error}"
        raise ArgumentError(msg) from error
    surroundings = {
        "import_path": sys.path,
        "device": None if device is None else str(device),
        "timeout": timeout,
        "sources": _sources(),
    }
    (folder / "call.pickle").write_bytes(call)
    (folder / "call.json").write_text(json.dumps(surroundings), encoding="utf-8")


def _sources() -> dict[str, str]:
    """Return the text of code that is in no file, such as a notebook's, for tracebacks."""
    cached = {name: linecache.getlines(name) for name in list(linecache.cache)}
    return {
        name: "".join(lines)
        for name, lines in cached.items()
        if lines and not Path(name).is_file()
    }


def _run(folder: Path, nproc: int) -> Ended:
    from torch.distributed.elastic.multiprocessing import (  # noqa: PLC0415  needed here only
        SignalException,
    )

    try:
        # a notebook shows what this process writes, and nothing else
        return run_here([WORKER, _RANK, str(folder)], nproc=nproc, follow_all=True)
    except SignalException as error:
        signal.raise_signal(
            error.sigval
        )  # as if it came now, to this process's handler
        msg = f"af.launch: ended by {error.sigval.name}, and its ranks with it."
        raise RankFailedError(msg) from error


def _result(folder: Path, rank: int) -> Any:
    file = folder / f"result-{rank}"
    if not file.is_file():
        msg = f"af.launch: rank {rank} left, by sys.exit or so, and returned nothing."
        raise RankFailedError(msg)
    return codec.from_bytes(file.read_bytes())
