# SPDX-License-Identifier: Apache-2.0
"""A file of settings: `accelfn.toml` in the current directory, or another that is named.

[launch]
nproc = 4
max_restarts = 2
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from accelfn.base import paths
from accelfn.errors import LaunchError
from accelfn.launching.options import OPTIONS, checked, near

FILE = "accelfn.toml"
TABLE = "launch"


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
        LaunchError: it is no TOML, or has a name or a value that none may have.
    """
    try:
        tables = tomllib.loads(file.read_text(encoding="utf-8"))
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
            msg = f"{file} has {name!r}, of which nothing is known.{hint or near(name, [TABLE])}"
            raise LaunchError(msg)
    settings: dict[str, Any] = tables.get(TABLE, {})
    return {name: checked(name, value, str(file)) for name, value in settings.items()}
