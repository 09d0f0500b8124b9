# SPDX-License-Identifier: Apache-2.0
"""What saves and stores may be asked, looked at before anything is done."""

import json
import os
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from accelfn.base.advice import advise
from accelfn.base.arguments import is_integer
from accelfn.checkpoint import disk
from accelfn.checkpoint.grammar import MEMBER
from accelfn.errors import ArgumentError, CheckpointWriteError, WorldError
from accelfn.state.argument import check_state
from accelfn.state.state import TrainState

Period: TypeAlias = int | timedelta
Given: TypeAlias = TrainState | Mapping[str, TrainState]
"""A state, or several by name that are saved and loaded together."""
States = TypeVar("States", TrainState, dict[str, TrainState])


def states_of(call: str, given: object) -> tuple[TrainState, dict[str, TrainState]]:
    """Return the first state that a call was given, and all by name; "" is a lone one's.

    Raises:
        ArgumentError: it was given something else, or a name with other characters.
        StateDonatedError: a step has taken one of them.
        WorldError: they are in different worlds.
    """
    states: dict[str, Any] = dict(given) if isinstance(given, Mapping) else {"": given}
    for name in states or [None]:
        if isinstance(given, Mapping) and not (
            isinstance(name, str) and MEMBER.fullmatch(name)
        ):
            msg = (
                f'{call}: {name!r} is not a state\'s name, such as "generator". A name has'
                " letters, digits, - and _ alone."
            )
            raise ArgumentError(msg)
    for each in states.values():
        check_state(call, each)
        each.lease.check()
    worlds = [each.world for each in states.values()]
    if len({(w.rank, w.size, w.size > 1 and id(w.connection)) for w in worlds}) != 1:
        msg = (
            f"{call}: {', '.join(states)} are in different worlds. Create all with"
            " world=world, the same World."
        )
        raise WorldError(msg)
    return next(iter(states.values())), states


def check_path(call: str, directory: object, before: str = "") -> None:
    """Refuse what is no path, or one that no disk can have."""
    if isinstance(directory, (str, os.PathLike)):
        name: object = os.fspath(directory)
        if isinstance(name, str):
            try:
                raw = os.fsencode(name)
            except UnicodeEncodeError:
                raw = b"\0"
            if b"\0" not in raw:
                return
    msg = f"{call}({before}{directory!r}): expected the path of a directory."
    raise ArgumentError(msg)


def check_frozen(frozen: str) -> None:
    """Refuse any other word."""
    if frozen not in ("write", "hash"):
        msg = f'af.save(frozen={frozen!r}): expected "write" or "hash".'
        raise ArgumentError(msg)


def check_options(
    keep: object, keep_best: object, best_is: object, every: object
) -> None:
    """Refuse what a store could not follow."""
    if keep is not None and not is_integer(keep, 1):
        msg = f"CheckpointStore(keep={keep!r}): expected at least 1, or None for all."
    elif not (keep_best is None or isinstance(keep_best, str)):
        msg = f"CheckpointStore(keep_best={keep_best!r}): expected a metric's name."
    elif best_is not in ("min", "max"):
        msg = f'CheckpointStore(best_is={best_is!r}): expected "min" or "max".'
    elif keep_best is None and best_is != "min":
        msg = (
            f"CheckpointStore(best_is={best_is!r}): of which metric? Say keep_best= too, the"
            " name of one that is given to save, or leave it out."
        )
    elif not (
        every is None
        or is_integer(every, 1)
        or (isinstance(every, timedelta) and every > timedelta())
    ):
        msg = (
            f"CheckpointStore(every={every!r}): expected a number of updates, a timedelta,"
            " or None."
        )
    else:
        return
    raise ArgumentError(msg)


def check_writable(directory: Path) -> None:
    """Make the directory, and a file in it, before anything is trained."""
    try:
        disk.make(directory)
        probe = directory / f".tmp-probe-{uuid.uuid4().hex}"  # other ranks make theirs
        disk.create(probe)
        disk.remove(probe)
    except OSError as error:
        msg = (
            f"CheckpointStore({str(directory)!r}) cannot be written to: {error};"
            f" {_mode_near(directory)}this is user {os.getuid()}."
        )
        raise CheckpointWriteError(msg) from error


def _mode_near(directory: Path) -> str:
    """Return what may be done where a directory is, or would be, as far as the disk says."""
    for each in (directory, *directory.parents):
        if disk.is_there(each):
            with suppress(OSError):
                return f"{each} has mode {oct(each.stat().st_mode & 0o7777)}, and "
    return ""


def _text(name: object) -> str:
    if not isinstance(name, str):  # 1 and "1" would be one
        raise TypeError
    return name


def _float(value: Any) -> float:
    if isinstance(value, (str, bool)):  # which float takes, too
        raise TypeError
    return float(value)


def numbers_of(metrics: Mapping[str, float] | None) -> dict[str, float]:
    """Return metrics as floats."""
    try:
        return {_text(name): _float(value) for name, value in (metrics or {}).items()}
    except (TypeError, ValueError, AttributeError) as error:
        msg = (
            f"CheckpointStore.save(metrics={metrics!r}): expected numbers by name, as"
            " af.mean(metrics, world) gives."
        )
        raise ArgumentError(msg) from error


def check_numbers(said: Sequence[str]) -> None:
    """Say so where ranks gave other metrics than rank 0, whose are kept."""
    first = json.loads(said[0])
    for rank, text in enumerate(said):
        if text != said[0]:
            advise(
                f"CheckpointStore.save(metrics=): rank 0 gives {first}, rank {rank}"
                f" {json.loads(text)}. Those of rank 0 are kept, and are what keep_best= goes"
                " by. Give what all ranks have in common: metrics=af.mean(metrics, world)."
            )
            return
