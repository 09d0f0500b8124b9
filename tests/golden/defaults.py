# SPDX-License-Identifier: Apache-2.0
"""Every default of every public option, as the lines of defaults.txt.

`python -m tests.golden.defaults` writes them; a change of the file is a change for users.
"""

import argparse
import inspect
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FunctionType
from typing import Any

import attrs

import accelfn as af
from accelfn import orders, testing, track
from tests.internals import OPTIONS
from tests.internals import parser as command_line

FILE = Path(__file__).with_name("defaults.txt")
_MODULES = {
    "af": af,
    "af.schedules": af.schedules,
    "af.orders": orders,
    "af.typing": af.typing,
    "af.track": track,
    "accelfn.testing": testing,
}
STANDS_FOR: Mapping[str, Mapping[str, Any]] = {
    f"af.{kind.__name__}": {
        field.name: field.metadata["usual"]
        for field in attrs.fields(kind)
        if field.metadata.get("usual") is not None
    }
    for kind in (af.compress_grads, af.autocast)
}
"""What is taken where an option's default is None."""


def callables() -> Iterator[tuple[str, Any]]:
    """Return what users call, and its methods, by name."""
    for prefix, module in _MODULES.items():
        names = getattr(module, "__all__", None) or dir(module)
        for name in sorted(name for name in names if not name.startswith("_")):
            value = getattr(module, name)
            if inspect.ismodule(value) or not callable(value):
                continue
            if inspect.isclass(value) and issubclass(value, BaseException):
                continue
            yield f"{prefix}.{name}", value
            if inspect.isclass(value):
                for each, method in sorted(vars(value).items()):
                    is_called = isinstance(method, (FunctionType, classmethod))
                    if is_called and not each.startswith("_"):
                        yield f"{prefix}.{name}.{each}", getattr(value, each)


def defaults() -> dict[str, dict[str, Any]]:
    """Return the defaults of each that has some."""
    found: dict[str, dict[str, Any]] = {}
    for name, value in callables():
        try:
            parameters = inspect.signature(value).parameters.values()
        except (TypeError, ValueError):  # of what is built in
            continue
        given = {p.name: p.default for p in parameters if p.default is not p.empty}
        if given:
            found[name] = given
    for name, parser in commands(command_line()):
        options = (each for each in parser._actions if each.option_strings)
        found[name] = {
            each.option_strings[-1]: each.default
            for each in options
            if each.dest != "help"
        }
    found["accelfn launch, and its files"] = {
        name: option.default for name, option in OPTIONS.items()
    }
    return found


def commands(parser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Return a command and those inside it."""
    yield parser.prog, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from commands(inner)


def lines() -> list[str]:
    """Return the file's lines."""
    found = []
    for name, options in defaults().items():
        found.append(name)
        for option, value in options.items():
            stands = STANDS_FOR.get(name, {}).get(option)
            for_what = "" if stands is None else f", which stands for {stands!r}"
            found.append(f"    {option} = {_shown(value)}{for_what}")
    return found


def _shown(value: object) -> str:
    if inspect.isclass(value) or inspect.isfunction(value):
        return value.__qualname__
    return re.sub(r" at 0x\w+", "", repr(value))


if __name__ == "__main__":
    is_new = FILE.read_text().splitlines() != lines()
    FILE.write_text("\n".join([*lines(), ""]))
    print(f"{FILE}: {'changed' if is_new else 'as it was'}")  # noqa: T201
