# SPDX-License-Identifier: Apache-2.0
"""The code of accelfn's pytest plugin that needs torch, and crash bundles.

Every pytest run imports `pytest_accelfn`. Only for a test with the marker `simulated`,
`pytest_accelfn` imports this module.
"""

import functools
import importlib
import importlib.util
import json
import os
import sys
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, cast

import attrs
import numpy as np
import pytest
import safetensors.torch
import torch
from pytest_accelfn import register_profiles

from accelfn import Batch, World
from accelfn.errors import ArgumentError, CheckpointError, SimulationError
from accelfn.plug import codec, save, tree
from accelfn.testing.simulate import simulate
from accelfn.testing.simulation.calls import Entry
from accelfn.testing.traffic import import_script
from accelfn.typing import Cursor

__all__ = ["on_ranks", "register_profiles"]

_NUM_SHOWN = 10
_REPEAT = "To repeat the run: "
"""A text in the note that `simulate` adds to an error."""


@contextmanager
def on_ranks(item: pytest.Function, options: Mapping[str, Any]) -> Generator[None]:
    """In a `with` block: run the item's test on every rank of a simulated world.

    The item's argument `world` is the size of the world. Under `@given`, each example is drawn
    before its world starts, and runs in a new world. Hypothesis's `assume` and `note` only work
    in the main thread of the test, so use them in strategies. The report of a failing test gets
    a section on how to repeat the test.
    """
    test: Any = item.obj
    is_hypothesis = getattr(test, "is_hypothesis_test", False)
    holder, name = (test.hypothesis, "inner_test") if is_hypothesis else (item, "obj")
    plain: Callable[..., Any] = getattr(holder, name)
    logs: list[list[Entry]] = []

    @functools.wraps(plain)
    def run_simulated(*args: Any, world: int, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        logs.clear()

        def rank(rank_world: World) -> Any:
            __tracebackhide__ = True
            group: Any = rank_world.group
            if rank_world.is_main:
                logs.append(group.log)
            return plain(*args, world=rank_world, **kwargs)

        rank.__qualname__ = plain.__qualname__
        run = simulate(world, rank, **options)
        return next((value for value in run if value is not None), None)

    setattr(holder, name, run_simulated)
    try:
        yield
    except (Exception, pytest.fail.Exception) as error:
        report = _format_report(item, error, logs[0] if logs else [])
        item.add_report_section("call", "simulated world", report)
        raise
    finally:
        setattr(holder, name, plain)


def _format_report(
    item: pytest.Function, error: BaseException, log: Sequence[Entry]
) -> str:
    """Return a text with the command that repeats a failed test, and the last collectives."""
    lines = [f"To repeat the test: pytest {item.nodeid!r}"]
    lines += [note for note in getattr(error, "__notes__", []) if _REPEAT in note]
    if log:
        lines.append(f"The last of {len(log)} completed collectives:")
    return "\n".join([*lines, *(f"  {entry}" for entry in log[-_NUM_SHOWN:])])


# Crash bundles: files with the arguments of a step that raised, to run it again in simulation.


Step: TypeAlias = Callable[..., tuple[Any, Any]]
Make: TypeAlias = Callable[[World], tuple[Any, Step]]

FORMAT = 1


def crash_bundles(step: Step, directory: str | os.PathLike[str], *, make: Make) -> Step:
    """Return a step that, if it raises an error, writes its arguments to disk on every rank.

    A bundle has the files `rank-00000.json` (the error, the setup, the latest collectives, the
    rank) and `rank-00000.safetensors` (the states and the batch). A new bundle overwrites an
    older bundle in the directory. `replay(directory)` or `accelfn replay DIR` runs the step again
    on simulated ranks.

    Args:
        step: a step `(states, batch, *extras) -> (states, metrics)`.
        directory: the directory for bundles. The first bundle creates the directory.
        make: a function `make(world) -> (states, step)` at the top level of a file. `replay`
            calls it.

    Raises:
        ArgumentError: `replay` could not import `make` by its name.

    Cost: nothing, until the step raises.
    """
    source = _source_of(make)

    def run_bundled(states: Any, batch: Any, /, *extras: Any, **named: Any) -> Any:
        try:
            return step(states, batch, *extras, **named)
        except Exception as error:
            try:
                path = _write(Path(directory), source, states, (batch, *extras), error)
                error.add_note(f"The arguments of the step are in {path}.")
            except Exception as other:  # noqa: BLE001 - the step's error is more important
                error.add_note(f"No crash bundle was written: {other!r}")
            raise

    return run_bundled


def replay(directory: str | os.PathLike[str]) -> None:
    """Run the step of a crash bundle again, on the same number of simulated ranks.

    Raises:
        CheckpointError: a rank's bundle is missing or has no state. The message says why.
        SimulationError: the step did not raise an error this time.
        Exception: the error that the step raised in the run. Inspect it with a debugger.
    """
    folder = Path(directory)
    bundles = _read_bundles(folder)
    first = bundles[0]
    make = _made_by(first["make"])

    def rank(world: World) -> None:
        bundle = bundles[world.rank]
        start, step = make(world)
        fields = iter(bundle["states"])
        states = tree.tree_map(
            lambda state: save.with_fields(state, next(fields)), start
        )
        step(states, *map(_again, bundle["given"]))

    simulate(len(bundles), rank)
    msg = (
        f"replay({str(folder)!r}): this time the step raised no error. When the bundle was"
        f" written, it raised {first['error']['kind']}: {first['error']['message']}"
    )
    raise SimulationError(msg)


def _write(
    folder: Path,
    source: Mapping[str, str],
    states: Any,
    args: Sequence[Any],
    error: Exception,
) -> Path:
    """Write one rank's bundle. The JSON file is written last, so it marks a complete bundle."""
    tensors = codec.Table(objects=True)
    flat = tree.tree_leaves(states)
    world = flat[0].definition.world
    path = folder / f"rank-{world.rank:05d}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    states = None
    # if the step raised in the middle of an update, tensors are partly updated
    if not any(state.lease.is_over for state in flat):
        states = [codec.encode(save.fields_of(s), tensors, path="state") for s in flat]
    bundle: dict[str, Any] = {
        "format": FORMAT,
        "rank": world.rank,
        "size": world.size,
        "make": dict(source),
        "setup": [repr(state.definition.setup) for state in flat],
        "latest": [
            f"{label} at update {step}"
            for label, step in world.connection.activity.trail
        ],
        "error": {
            "kind": type(error).__name__,
            "message": str(error),
            "traceback": "".join(traceback.format_exception(error)),
        },
        "states": states,
        "given": [codec.encode(_plain(arg), tensors, path="batch") for arg in args],
    }
    dense = {k: t.detach().cpu().contiguous().clone() for k, t in tensors.items()}
    safetensors.torch.save_file(dense, path.with_suffix(".safetensors"))
    path.write_text(json.dumps(bundle, indent=1))
    return path


def _read_bundles(folder: Path) -> list[dict[str, Any]]:
    """Read the bundles of all ranks."""
    paths = sorted(folder.glob("rank-*.json"))
    if not paths:
        msg = f"{folder} contains no crash bundle (rank-*.json). Name the folder of a bundle."
        raise CheckpointError(msg)
    all_bundles = [*map(_read_rank, paths)]
    size = all_bundles[0]["size"]
    # an earlier run on another number of ranks may have left bundles in the folder
    bundles = {
        bundle["rank"]: bundle for bundle in all_bundles if bundle["size"] == size
    }
    missing = [rank for rank in range(size) if rank not in bundles]
    if missing:
        msg = (
            f"{folder}: the bundle of rank {', '.join(map(str, missing))} is missing (of {size}"
            " ranks). A killed process writes no bundle. The step cannot run again without the"
            " bundles of all ranks."
        )
        raise CheckpointError(msg)
    return [bundles[rank] for rank in range(size)]


def _read_rank(path: Path) -> dict[str, Any]:
    bundle = cast("dict[str, Any]", json.loads(path.read_text()))
    if bundle.get("format") != FORMAT:
        msg = (
            f"{path} has the format {bundle.get('format')!r}, but this version of accelfn reads"
            f" only {FORMAT}. Replay the bundle with the version that wrote it."
        )
        raise CheckpointError(msg)
    if bundle["states"] is None:
        msg = (
            f"{path}: the bundle has no state, because the step raised in the middle of an"
            f" update and the state was partly updated. The error of the step was:\n"
            f"{bundle['error']['traceback']}"
        )
        raise CheckpointError(msg)
    tensors = safetensors.torch.load_file(path.with_suffix(".safetensors"))
    for part in ("states", "given"):
        bundle[part] = [codec.decode(code, tensors) for code in bundle[part]]
    return bundle


def _plain(batch: Any) -> Any:
    """Convert a batch, or an extra argument of the loss, to a tree of tensors and plain data."""
    if not isinstance(batch, Batch):
        return {"value": batch}
    parts = attrs.asdict(batch, recurse=False)
    for name, cursor in (("start", batch.start), ("cursor", batch.cursor)):
        parts[name] = None if cursor is None else cursor.to_plain()
    for name in ("parts_indices", "parts_filler"):
        parts[name] = tuple(torch.as_tensor(np.asarray(part)) for part in parts[name])
    parts["shares"] = None if batch.shares is None else [*map(list, batch.shares())]
    return {"batch": parts}


def _again(plain: Mapping[str, Any]) -> Any:
    if "value" in plain:
        return plain["value"]
    parts = dict(plain["batch"])
    for name in ("start", "cursor"):
        parts[name] = None if parts[name] is None else Cursor(*parts[name])
    for name in ("parts_indices", "parts_filler"):
        parts[name] = tuple(part.numpy() for part in parts[name])
    if parts["shares"] is not None:
        parts["shares"] = partial(list, parts["shares"])
    return Batch(**parts)


def _source_of(make: Make) -> dict[str, str]:
    """Return the module, name and file of a function, so that `replay` can import it."""
    module, name = getattr(make, "__module__", ""), getattr(make, "__qualname__", "")
    file = getattr(sys.modules.get(module), "__file__", None)
    if not name.isidentifier() or file is None:
        msg = (
            f"crash_bundles(make={make!r}): expected a function at the top level of a"
            " file, so that replay can import it by name."
        )
        raise ArgumentError(msg)
    return {"module": module, "name": name, "file": str(Path(file).absolute())}


def _made_by(source: Mapping[str, str]) -> Make:
    name = source["module"]
    if name not in sys.modules and importlib.util.find_spec(name) is None:
        name = "__main__"
    if name != "__main__":
        return getattr(importlib.import_module(name), source["name"])
    module = import_script(Path(source["file"]))
    if module is None:
        msg = (
            f"replay: Python cannot import {source['file']}, which defines make. Move make to a"
            " file with the suffix .py, and write the bundle again."
        )
        raise CheckpointError(msg)
    return getattr(module, source["name"])
