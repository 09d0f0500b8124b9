# SPDX-License-Identifier: Apache-2.0
"""Find a test and its arguments by pytest's id, such as `test_ring::test_masks[causal]`.

If several folders have a file of that name, add the folder: `laws.test_ring::test_masks`.
"""

import functools
import importlib
import itertools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import attrs
from _pytest.mark.structures import ParameterSet  # pytest has no public name for ids
from _pytest.python import IdMaker

_ROOT = Path(__file__).parents[1]


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
    names, is_single = ParameterSet._parse_parametrize_args(names, rows)
    sets = ParameterSet._parse_parametrize_parameters(rows, is_single)
    made = (ids, None) if callable(ids) else (None, ids and list(ids))
    said = IdMaker(names, sets, *made, config=None, nodeid=None)
    args = [dict(zip(names, each.values, strict=True)) for each in sets]
    return list(zip(said.make_unique_parameterset_ids(), args, strict=True))


@functools.cache
def _modules() -> list[str]:
    paths = sorted(_ROOT.rglob("test_*.py"))
    return [
        ".".join(("tests", *each.relative_to(_ROOT).with_suffix("").parts))
        for each in paths
    ]
