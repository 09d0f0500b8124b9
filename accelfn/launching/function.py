# SPDX-License-Identifier: Apache-2.0
"""`launch`: run a function on several ranks, from a script or a notebook.

Ranks are new Python processes, not forks. A fork inherits this process's locks without the
threads that would release them, and cannot use a GPU that this process has used. So cloudpickle
pickles the function. It saves the function's name if ranks can import its module. Otherwise (a
notebook, the running script, an inner function) it saves the code and all objects that the code
refers to. Only this process's own children read the pickle. Results return as plain data and
tensors.
"""

import json
import linecache
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Concatenate

import torch

from accelfn import World
from accelfn.errors import ArgumentError, LaunchError, RankFailedError, WorldError
from accelfn.launching.machines import Plan
from accelfn.launching.script import run_here
from accelfn.launching.settings import MOST_PROCESSES
from accelfn.plug import arguments, asked_size, codec, devices
from accelfn.plug import axes as arithmetic

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
    """Run `fn(world, *args)` in several new processes, one per rank, and return the results.

    You can call this in a script, without `if __name__ == "__main__":`, and in Jupyter with a
    function from a cell. Colab and Kaggle use the same kernel, but are not tested. Ranks have
    the current directory, import path and environment of this process, and copies of the objects
    that the function uses. Only results and printed output return to this process. Ranks share
    no memory with this process, so read large data in `fn` instead of passing it.

    Args:
        size: the number of ranks.
        fn: the function to run on each rank. Its first argument is the rank's `World`.
        args: further arguments of the function.
        device: as in `World.from_env`. Default: a GPU for each rank, or the CPU without GPUs.
        timeout: as in `World.from_env`.
        axes: as in `World.from_env`: how the ranks share the work.

    Returns:
        A list with the result of each rank, by rank. A result can contain tensors, which are on
        the CPU, and plain data: strings, numbers, booleans, None, and dicts, lists and tuples of
        plain data and tensors.

    Law: the random state, modes, default process group, environment and signal handlers of this
    process do not change.

    Cost: about 3 s to start Python and import torch.

    Raises:
        ArgumentError: `fn` or an argument cannot be pickled, or an option is invalid. No
            process was started.
        LaunchError: a launcher started this process as a rank.
        RankFailedError: a rank failed. The message starts with the traceback of the rank that
            failed first.

    Example:
        >>> launch(2, lambda world, x: x + world.rank, 10)
        [10, 11]
    """
    _check(size, fn, device=device, timeout=timeout)
    if error := arguments.call_mismatch(fn, None, *args):
        msg = f"af.launch({size}, fn, *args) calls fn(world, *args): {error}. Write def fn(world):"
        raise ArgumentError(msg)
    sizes = None if axes is None else arithmetic.resolve_axes("af.launch", axes, size)
    name, num_ranks = asked_size(os.environ)
    if num_ranks > 1:
        msg = (
            f"af.launch: a launcher has already started this process as one of {num_ranks}"
            f" ({name}={num_ranks}), and each of them would start {size} more. Call your function"
            " directly instead: fn(af.World.from_env(), *args)."
        )
        raise LaunchError(msg)
    with tempfile.TemporaryDirectory(prefix="accelfn-call-") as name:
        folder = Path(name)
        text = None if device is None else str(torch.device(device))
        options = {"device": text, "timeout": timeout, "axes": sizes}
        _write_call(folder, fn, args, options)
        # follow_all: a notebook shows only the output of this process, not that of rank 0
        result = run_here([_RANK, str(folder)], Plan(nproc=size), follow_all=True)
        if isinstance(result, signal.Signals):
            signal.raise_signal(result)  # call this process's own handler
            msg = f"af.launch: received {result.name}, and ended all ranks."
            raise RankFailedError(msg)
        if result.failures:
            raise RankFailedError(result.report)
        return [_result(folder, rank) for rank in range(size)]


def _check(size: object, fn: object, *, device: object, timeout: object) -> None:
    """Reject arguments that every rank would reject."""
    if callable(size):
        msg = f"af.launch({size!r}, ...): the first argument is a number: af.launch(2, fn, *args)."
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
            f"af.launch({size}, fn, device={device!r}): this needs {least} devices of type"
            f" {target.type!r}, but torch sees {count} here. Start fewer ranks, or pass another"
            ' device, such as device="cpu".'
        )
        raise ArgumentError(msg)


def _write_call(
    folder: Path,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    options: Mapping[str, Any],
) -> None:
    cloudpickle = arguments.package(
        "cloudpickle", call="af.launch", extra="interactive", error=LaunchError
    )
    try:
        call = cloudpickle.dumps((fn, args))
    except Exception as error:
        msg = f"af.launch: {fn!r} or its arguments cannot be pickled: {error}"
        raise ArgumentError(msg) from error
    context = {"import_path": sys.path, "options": options, "sources": _sources()}
    (folder / "call.pickle").write_bytes(call)
    (folder / "call.json").write_text(json.dumps(context), encoding="utf-8")


def _sources() -> dict[str, str]:
    """Return source code that is not in a file, such as a notebook's cells, for tracebacks."""
    cache = {name: linecache.getlines(name) for name in list(linecache.cache)}
    return {
        name: "".join(lines)
        for name, lines in cache.items()
        if lines and not arguments.is_file(Path(name))
    }


def _result(folder: Path, rank: int) -> Any:
    file = folder / f"result-{rank}"
    if not arguments.is_file(file):
        msg = f"af.launch: rank {rank} exited, for example by sys.exit(), without a result."
        raise RankFailedError(msg)
    return codec.from_bytes(file.read_bytes())
