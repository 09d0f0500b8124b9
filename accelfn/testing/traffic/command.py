# SPDX-License-Identifier: Apache-2.0
"""`accelfn traffic`: what programs of a file send, as tables."""

import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from accelfn.base import paths
from accelfn.errors import ArgumentError
from accelfn.testing.traffic.link import Link
from accelfn.testing.traffic.traffic import communication
from accelfn.world import World

Program = Callable[[World], object]

_MEGABIT = 125_000
_TCP = 0.068  # of a byte: headers over Ethernet's frames, and what says that they came


def foresee(programs: Sequence[str], *, ranks: str, link: str | None) -> Iterator[str]:
    """Yield a table for each program.

    Args:
        programs: of each `FILE.py:FUNCTION` or `MODULE:FUNCTION`; the function takes a world.
        ranks: numbers with commas between them.
        link: megabits a second, and milliseconds of latency, with a comma between them.

    Raises:
        ArgumentError: a word is not of this form, or there is no such function; or as
            `communication`.
    """
    sizes, joined = _sizes(ranks), None if link is None else _link(link)
    twice = {name for name in programs if programs.count(name) > 1}
    if twice:
        msg = f"{min(twice)} is there twice; name each program once."
        raise ArgumentError(msg)
    named = {name: _program(name) for name in programs}
    found = {name: communication(program) for name, program in named.items()}
    for name, traffic in found.items():
        yield f"{name}\n{traffic.table(sizes, link=joined)}\n"


def _sizes(ranks: str) -> list[int]:
    words = ranks.split(",")
    if not all(word.strip().isdecimal() and int(word) > 0 for word in words):
        msg = f"--ranks is {ranks!r}; give numbers of ranks, as in 2,8,64."
        raise ArgumentError(msg)
    return [int(word) for word in words]


def _link(link: str) -> Link:
    try:
        megabits, milliseconds = map(float, link.split(","))
    except ValueError:
        msg = (
            f"--link is {link!r}; give megabits a second and milliseconds of latency, as in"
            " 1000,0.1."
        )
        raise ArgumentError(msg) from None
    return Link(
        latency=milliseconds / 1000, bandwidth=megabits * _MEGABIT, overhead=_TCP
    )


def _program(word: str) -> Program:
    """Return the function that a word names."""
    source, _, name = word.rpartition(":")
    if not source or not name:
        msg = (
            f"{word!r} names no program; write FILE.py:FUNCTION, as in train.py:train."
        )
        raise ArgumentError(msg)
    module = _file(Path(source)) if source.endswith(".py") else _module(source)
    found: Any = getattr(module, name, None)
    if not callable(found):
        msg = (
            f"{source} has no function {name!r}; name one that takes a World and trains some"
            " updates, as `simulate` takes it."
        )
        raise ArgumentError(msg)
    return found


def _file(path: Path) -> ModuleType:
    """Import a script under a name of its own, so that its `__main__` part does not run."""
    name = f"foreseen {path}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not paths.is_file(path):
        msg = f"There is no file {path}; name one from this directory."
        raise ArgumentError(msg)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look for their own module
    sys.path.insert(0, str(path.parent))  # as `python script.py` finds its neighbours
    spec.loader.exec_module(module)
    return module


def _module(name: str) -> ModuleType:
    sys.path.insert(0, "")
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name.split(".", maxsplit=1)[0] and error.name != name:
            raise
        msg = f"There is no module {name}; name a file, as in train.py:train."
        raise ArgumentError(msg) from None
