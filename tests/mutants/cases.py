# SPDX-License-Identifier: Apache-2.0
"""Tests and their arguments by pytest's ids: `test_ring::test_masks[causal]`.

A folder comes first where several have a file of that name: `laws.test_ring::test_masks`.
"""

import functools
import importlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import attrs
import pytest

_ROOT = Path(__file__).parents[1]
_PARAM = type(pytest.param())


@attrs.frozen
class Case:
    """A test, and the arguments that pytest gives it."""

    test: Callable[..., None]
    args: dict[str, Any]


def find_module(case: str) -> str:
    """Return the module of a case, by the id of the case.

    Raises:
        LookupError: no file of tests has the name, or several have.
    """
    file = case.partition("::")[0]
    found = [each for each in _modules() if f".{each}".endswith(f".{file}")]
    if len(found) != 1:
        msg = f"{file!r} is the name of {len(found)} files of tests, expected one: {found}"
        raise LookupError(msg)
    return found[0]


def find_case(case: str) -> Case:
    """Return the test that has an id, and its arguments.

    Raises:
        LookupError: there is no such test, or it has no such parameters.
    """
    name, _, parameters = case.partition("::")[2].partition("[")
    test = getattr(importlib.import_module(find_module(case)), name, None)
    if test is None:
        msg = f"there is no test {case!r}"
        raise LookupError(msg)
    args = args_by_id(test)
    if parameters.removesuffix("]") not in args:
        msg = f"there is no test {case!r}; {name} has the parameters {list(args)}"
        raise LookupError(msg)
    return Case(test, args[parameters.removesuffix("]")])


@functools.cache
def args_by_id(test: Callable[..., None]) -> dict[str, dict[str, Any]]:
    """Return all arguments that pytest gives a test, by the id in brackets."""
    marks = [
        each for each in getattr(test, "pytestmark", []) if each.name == "parametrize"
    ]
    found = {}
    for each in itertools.product(*[_parametrized(*m.args, **m.kwargs) for m in marks]):
        args = {name: value for _, given in each for name, value in given.items()}
        found["-".join(id_ for id_, _ in each)] = args
    return found


def _parametrized(
    names: str | Sequence[str], rows: Iterable[Any], ids: Any = None
) -> list[tuple[str, dict[str, Any]]]:
    """Return the id and the arguments of each row of a parametrization."""
    if isinstance(names, str):
        names = names.replace(" ", "").split(",")
    listed = None if ids is None or callable(ids) else list(ids)
    said, found = [], []
    for index, row in enumerate(rows):
        is_param = isinstance(row, _PARAM)
        values = row.values if is_param else row if len(names) > 1 else [row]
        own = [_id(n, v, index, ids) for n, v in zip(names, values, strict=True)]
        explicit = (
            row.id if is_param and row.id is not None else listed and listed[index]
        )
        said.append("-".join(own) if explicit is None else _escaped(str(explicit)))
        found.append(dict(zip(names, values, strict=True)))
    return list(zip(_told_apart(said), found, strict=True))


def _id(name: str, value: Any, index: int, ids: Any) -> str:
    """Return what pytest calls a value."""
    said = ids(value) if callable(ids) else None
    value = value if said is None else said
    if isinstance(value, bytes):
        return value.decode("ascii", "backslashreplace")
    if isinstance(value, str):
        return _escaped(value)
    if value is None or isinstance(value, int | float | complex | Enum):
        return str(value)
    called = getattr(value, "__name__", None)
    return called if isinstance(called, str) else f"{name}{index}"


def _escaped(text: str) -> str:
    return text.encode("unicode_escape").decode()


def _told_apart(ids: list[str]) -> list[str]:
    """Return ids with numbers behind those that occur several times."""
    counts, numbers = Counter(ids), Counter[str]()
    found = []
    for each in ids:
        if counts[each] == 1:
            found.append(each)
            continue
        between = "_" if each[-1:].isdigit() else ""
        found.append(f"{each}{between}{numbers[each]}")
        numbers[each] += 1
    return found


@functools.cache
def _modules() -> list[str]:
    paths = sorted(_ROOT.rglob("test_*.py"))
    return [
        ".".join(("tests", *each.relative_to(_ROOT).with_suffix("").parts))
        for each in paths
    ]
