# SPDX-License-Identifier: Apache-2.0
"""A file of settings: `accelfn.toml` in the current directory, or another that is named.

[launch]
nproc = 4
max_restarts = 2
"""

from __future__ import annotations

import os
import stat
import tomllib
from pathlib import Path
from typing import Any

from accelfn.base import paths
from accelfn.errors import LaunchError
from accelfn.launching.options import OPTIONS, checked, near

FILE = "accelfn.toml"
TABLE = "launch"
_MOST_BYTES, _DEEPEST = 2**16, 100
_MEETS = ("main_address", "rdzv_endpoint")


def find(named: str | None) -> Path | None:
    """Return the file of settings that is named, or the current directory's, if it has one.

    Raises:
        LaunchError: the one that is named is not there.
    """
    file = Path(FILE if named is None else named)
    if paths.is_file(file):
        return file
    if named is not None:
        msg = (
            f"there is no file {named!r} in {Path.cwd()}; `accelfn config` writes one."
        )
        raise LaunchError(msg)
    return None


def read(file: Path) -> dict[str, Any]:
    """Return the settings that a file has.

    Raises:
        LaunchError: the file is not TOML, or has an unknown name or a wrong value; or it says
            where machines meet, and another user can write it.
    """
    try:
        with file.open("rb") as opened:
            about = os.fstat(opened.fileno())
            tables = tomllib.loads(_decode_bounded(opened.read(_MOST_BYTES + 1)))
    except (OSError, ValueError) as error:
        msg = f"{file} cannot be read: {error}."
        raise LaunchError(msg) from error
    for name, table in tables.items():
        if name == TABLE and not isinstance(table, dict):
            msg = (
                f"{file} has {TABLE!r}, which must be a table: a line [{TABLE}], and"
                " settings below it."
            )
            raise LaunchError(msg)
        if name != TABLE:
            hint = f" Write it below [{TABLE}]." if name in OPTIONS else ""
            hint = hint or near(name, [TABLE])
            msg = f"{file} has {name!r:.80}, of which nothing is known.{hint}"
            raise LaunchError(msg)
    settings: dict[str, Any] = tables.get(TABLE, {})
    named = [name for name in _MEETS if name in settings]
    if named and (about.st_uid != os.getuid() or about.st_mode & stat.S_IWOTH):
        msg = (
            f"{file} has {named[0]!r}, and another user owns it or can write to it: that"
            " user would say where this run connects. Read it, copy it, and name your copy:"
            " accelfn launch --config COPY."
        )
        raise LaunchError(msg)
    return {name: checked(name, value, str(file)) for name, value in settings.items()}


def _decode_bounded(data: bytes) -> str:
    """Return a text that is neither long nor deep: the parser's memory grows with both."""
    brackets = data.count(b"[") + data.count(b"{")
    dots = max(line.count(b".") for line in data.split(b"\n"))
    if len(data) > _MOST_BYTES or brackets + dots > _DEEPEST:
        msg = (
            f"it has more than {_MOST_BYTES} bytes, or more than {_DEEPEST} brackets and dots"
            " in a key; no settings are so long or deep"
        )
        raise ValueError(msg)
    return data.decode()
