# SPDX-License-Identifier: Apache-2.0
"""Find a test and its arguments by pytest's id, such as `test_ring::test_masks[causal]`.

If several folders have a file of that name, add the folder: `laws.test_ring::test_masks`.
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
    """Return the name of the module of a test, given the test's id.

    Raises:
        LookupError: no test file has the name, or several test files have the name.
    """
    file = case.partition("::")[0]
    found = [each for each in _modules() if f".{each}".endswith(f".{file}")]
    if len(found) != 1:
        msg = f"{file!r} is the name of {len(found)} test files, expected one: {found}"
        raise LookupError(msg)
    return found[0]


def find_case(case: str) -> Case:
    """Return the test with this id, and the test's arguments.

    Raises:
        LookupError: the test does not exist, or does not have these parameters.
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
    """Return the arguments of each parametrization of a test, by the id in brackets."""
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
    """Return the id and the arguments for each row of a `pytest.mark.parametrize`."""
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
    """Return the id that pytest creates for a parameter's value."""
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
    """Append numbers to ids that occur several times, as pytest does."""
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
