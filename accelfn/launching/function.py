# SPDX-License-Identifier: Apache-2.0
"""`launch`: a function on several ranks, from a script or a notebook.

Ranks are new Python processes, not forks: a fork inherits this process's locks without the
threads that would release them, and cannot use a GPU that this process used. So the function is
pickled by cloudpickle: by name if ranks can import its module; otherwise (from a notebook, the
running script or another function) by value, with everything it refers to. The pickle only goes
from this process to its own children. Results come back as plain data and tensors.
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
import torch

from accelfn.errors import ArgumentError, LaunchError, RankFailedError, WorldError
from accelfn.launching.machines import Plan
from accelfn.launching.script import check_system, run_here
from accelfn.launching.settings import MOST_PROCESSES
from accelfn.plug import arguments, asked_size, codec, devices
from accelfn.plug import axes as arithmetic

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from accelfn import World
    from accelfn.launching.agent import Ended

_RANK = str(Path(__file__).with_name("rank.py"))


@arguments.explain_call_errors
def launch(
    size: int,
    fn: Callable[Concatenate[World, ...], Any],
    /,
    *args: Any,
    device: str | torch.device | None = None,
    timeout: float = 300.0,
    axes: Mapping[str, int] | None = None,
) -> list[Any]:
    """Run `fn(world, *args)` on every rank of a new world of processes, and return the results.

    You can call it in a script, without `if __name__ == "__main__":`, and in Jupyter, where the
    function can be defined in a cell. Colab and Kaggle use the same kernel, but are not tested.
    Ranks have this process's directory, import path and environment, and copies of the objects
    that the function refers to. Only results and output come back. Ranks share no memory with
    this process, so read big data in `fn` instead of passing it.

    Args:
        size: the number of ranks.
        fn: the function to run on each rank. Its first argument is the rank's `World`.
        args: further arguments of the function.
        device: as in `World.from_env`: default a GPU for each rank, or the CPU without GPUs.
        timeout: as in `World.from_env`.
        axes: as in `World.from_env`: how the ranks share the work.

    Returns:
        Each rank's result, by rank: tensors, on the CPU, and plain data (strings, numbers,
        booleans, None, and dicts, lists and tuples of them).

    Law: this process does not change: its random state, its modes, its default process group,
    its environment, its signal handlers.

    Cost: about 3 s to start Python and import torch.

    Raises:
        ArgumentError: `fn` or an argument cannot be pickled, or an option is invalid; no
            process was started.
        LaunchError: this process is a rank itself.
        RankFailedError: a rank failed; the text begins with the traceback of the first.

    Example:
        >>> launch(2, lambda world, x: x + world.rank, 10)
        [10, 11]
    """
    _check(size, fn, device=device, timeout=timeout)
    sizes = None if axes is None else arithmetic.resolve_axes("af.launch", axes, size)
    name, num_ranks = asked_size(os.environ)
    if num_ranks > 1:
        msg = (
            f"af.launch: this process is one of {num_ranks} already ({name}={num_ranks}), and each"
            f" would start {size} more. Call the function itself, with"
            " af.World.from_env()."
        )
        raise LaunchError(msg)
    with tempfile.TemporaryDirectory(prefix="accelfn-call-") as name:
        folder = Path(name)
        text = None if device is None else str(torch.device(device))
        options = {"device": text, "timeout": timeout, "axes": sizes}
        _write_call(folder, fn, args, options)
        result = _run(folder, size)
        if result.failures:
            raise RankFailedError(result.report)
        return [_result(folder, rank) for rank in range(size)]


def _check(size: object, fn: object, *, device: object, timeout: object) -> None:
    """Reject arguments that every rank would reject."""
    if callable(size):
        msg = (
            f"af.launch({size!r}, ...): the number of ranks comes first, as in simulate:"
            " af.launch(2, fn, *args)."
        )
        raise ArgumentError(msg)
    if not arguments.is_integer(size, 1) or size > MOST_PROCESSES:
        most = f"{MOST_PROCESSES} at most"
        msg = f"af.launch({size!r}, fn): expected a number of ranks, 1 or more, {most}."
        raise ArgumentError(msg)
    if not callable(fn):
        msg = f"af.launch({size}, {fn!r}): expected a function, fn(world, *args)."
        raise ArgumentError(msg)
    arguments.check_seconds("af.launch", "timeout", timeout)
    _check_device(device, size)


def _check_device(device: Any, size: int) -> None:
    kind = devices.kind()
    try:
        target = devices.parse_device(kind if device is None else device)
        devices.check_kind(target)
    except WorldError as error:
        msg = f"af.launch(device={device!r}): {error}"
        raise ArgumentError(msg) from error
    least = size if target.index is None else target.index + 1
    count = devices.count() if target.type == kind else 0
    if target.type != "cpu" and least > count:
        msg = (
            f"af.launch({size}, fn, device={device!r}): that takes {least} devices of type"
            f" {target.type!r}, and torch sees {count} here. Start fewer ranks, or pass"
            ' device="cpu".'
        )
        raise ArgumentError(msg)


def _write_call(
    folder: Path,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    options: Mapping[str, Any],
) -> None:
    try:
        call = cloudpickle.dumps((fn, args))
    except Exception as error:
        msg = f"af.launch: {fn!r} or its arguments cannot travel to another process: {error}"
        raise ArgumentError(msg) from error
    surroundings = {
        "import_path": sys.path,
        "options": options,
        "sources": _sources(),
    }
    (folder / "call.pickle").write_bytes(call)
    (folder / "call.json").write_text(json.dumps(surroundings), encoding="utf-8")


def _sources() -> dict[str, str]:
    """Return the source of code without a file, such as a notebook's, for tracebacks."""
    cache = {name: linecache.getlines(name) for name in list(linecache.cache)}
    return {
        name: "".join(lines)
        for name, lines in cache.items()
        if lines and not arguments.is_file(Path(name))
    }


def _run(folder: Path, nproc: int) -> Ended:
    check_system()  # before imports that may fail there
    from torch.distributed.elastic.multiprocessing import (  # noqa: PLC0415  needed here only
        SignalException,
    )

    try:
        # a notebook shows what this process writes, and nothing else
        return run_here([_RANK, str(folder)], Plan(nproc=nproc), follow_all=True)
    except SignalException as error:
        signal.raise_signal(
            error.sigval
        )  # as if it came now, to this process's handler
        msg = f"af.launch: ended by {error.sigval.name}, and its ranks with it."
        raise RankFailedError(msg) from error


def _result(folder: Path, rank: int) -> Any:
    file = folder / f"result-{rank}"
    if not arguments.is_file(file):
        msg = f"af.launch: rank {rank} left, by sys.exit or so, and returned nothing."
        raise RankFailedError(msg)
    return codec.from_bytes(file.read_bytes())
