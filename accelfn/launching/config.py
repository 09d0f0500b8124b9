# SPDX-License-Identifier: Apache-2.0
"""`accelfn config`: write the file of settings, from answers or from the command line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomlkit

from accelfn.base import paths
from accelfn.errors import LaunchError
from accelfn.launching.file import FILE, TABLE, read
from accelfn.launching.options import DYNAMIC, NUMBERED, OPTIONS, checked
from accelfn.launching.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence


def configure(
    named: str | None,
    assignments: Sequence[str],
    *,
    default: bool,
    ask: Callable[[str], str] | None = None,
) -> Path:
    """Write a file of settings, and return its path.

    A file that is there already gives what is not said otherwise, and keeps its comments.

    Args:
        named: the file; default `accelfn.toml` in the current directory.
        assignments: settings as `name=value`; `name=` takes one out.
        default: whether the defaults are written down. Nothing is asked where they are,
            or where there are assignments.
        ask: shows a question and returns the answer; default on the terminal.

    Raises:
        LaunchError: a setting, or several together, cannot be; nothing is written.
    """
    file = Path(FILE if named is None else named)
    found = read(file) if paths.is_file(file) else {}
    if default:
        begun = {n: o.default for n, o in OPTIONS.items() if o.default is not None}
        found = {**begun, **found}
    for each in assignments:
        _assign(found, each)
    if not assignments and not default:
        for name in _questions(found):
            _answer(found, name, ask or _terminal())
    Settings.of({}, found, str(file), is_whole=False)
    in_order = {name: found[name] for name in OPTIONS if name in found}
    text = file.read_text(encoding="utf-8") if paths.is_file(file) else ""
    part = file.with_name(f".{file.name}.part")
    try:
        part.write_text(edited(text, in_order), encoding="utf-8")
        part.replace(file)
    except OSError as error:
        msg = f"{file} cannot be written: {error}."
        raise LaunchError(msg) from error
    return file


def edited(text: str, settings: Mapping[str, Any]) -> str:
    """Return a file's text with these settings and its own comments, order and blank lines."""
    document = tomlkit.parse(text)
    table: Any = document.setdefault(TABLE, tomlkit.table())
    for name in [each for each in table if each not in settings]:
        table.remove(name)
    for name, value in settings.items():
        if name not in table or table[name] != value:
            table[name] = value
    return tomlkit.dumps(document)


def _assign(found: dict[str, Any], text: str) -> None:
    name, equals, value = text.partition("=")
    if not equals:
        msg = f"--set {text!r}; write it as NAME=VALUE."
        raise LaunchError(msg)
    name = name.strip().replace("-", "_")
    if name in OPTIONS and not value:
        found.pop(name, None)
        return
    kind = OPTIONS[name].kind if name in OPTIONS else None
    given = value if kind is None else kind.from_text(value)
    found[name] = checked(name, given, "--set")


def _questions(found: dict[str, Any]) -> Iterator[str]:
    """Yield the names of what is to be asked, as the answers come in."""
    yield "nproc"
    yield "num_machines"
    if found.get("num_machines", 1) == 1:
        for name in (*NUMBERED, *DYNAMIC):
            found.pop(name, None)
    else:
        # a machine's number is its own, and given on its command line
        is_dynamic = isinstance(found["num_machines"], str) or "rdzv_endpoint" in found
        yield from DYNAMIC if is_dynamic else ("main_address", "main_port")
    yield "max_restarts"


def _answer(found: dict[str, Any], name: str, ask: Callable[[str], str]) -> None:
    """Ask until the answer can be; an empty one keeps what there is."""
    option = OPTIONS[name]
    kept = found.get(name, option.default)
    shown = "none" if kept is None else kept
    while True:
        text = ask(f"{name}: {option.help} [{shown}] ").strip()
        try:
            if text:
                kept = checked(name, option.kind.from_text(text), "the answer")
        except LaunchError as error:
            sys.stderr.write(f"{error}\n")
            continue
        if kept is not None:
            found[name] = kept
        return


def _terminal() -> Callable[[str], str]:
    if not sys.stdin.isatty():
        msg = (
            "there is no terminal to ask on; give --default, or --set NAME=VALUE for what"
            " is to be written."
        )
        raise LaunchError(msg)

    def ask(question: str) -> str:
        try:
            return input(question)
        except EOFError:
            msg = "the answers ended; nothing is written."
            raise LaunchError(msg) from None

    return ask
