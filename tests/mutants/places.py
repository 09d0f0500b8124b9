# SPDX-License-Identifier: Apache-2.0
"""Find functions of accelfn by their qualified names, in any module.

`Failure.exit_code` is a method. If several modules have a function of that name, add a part of the
module's path: `launching:read`, or `launching.settings:read`.
"""

import ast
import functools
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, MemberDescriptorType
from typing import Any

import attrs

import accelfn
from tests.mutants.change import Function

_ROOT = Path(accelfn.__file__).parent
_NOT_THE_FUNCTION = re.compile(r"overload$|\.(setter|deleter)$")


@attrs.frozen
class Place:
    """A function of accelfn.

    Attributes:
        module: the name of the function's module.
        name: the qualified name of the function.
        source: the source text, without decorators.
    """

    module: str
    name: str
    source: str

    @property
    def node(self) -> Function:
        """A new copy of the function's syntax tree."""
        is_indented = self.source.startswith(" ")
        tree = ast.parse(f"if True:\n{self.source}" if is_indented else self.source)
        return tree.body[0].body[0] if is_indented else tree.body[0]

    @property
    def function(self) -> FunctionType:
        """The function object: for a property its getter, for a wrapper the inner function."""
        owner: Any = importlib.import_module(self.module)
        *classes, name = self.name.split(".")
        for each in classes:
            owner = vars(owner)[each]
        found = vars(owner)[name]
        if isinstance(found, MemberDescriptorType):
            found = _cached_by_attrs(owner)[name]
        for field in ("__func__", "fget", "func"):
            found = getattr(found, field, found)
        return inspect.unwrap(found)


@functools.cache
def find_place(text: str) -> Place:
    """Return the function that a row of the table names.

    Raises:
        LookupError: accelfn has no function of this name, or several.
    """
    path, _, name = text.rpartition(":")
    modules = _modules_by_function().get(name.rpartition(".")[2], [])
    named = [place for module in modules for place in _functions(module).get(name, [])]
    found = [place for place in named if f".{path}." in f".{place.module}." or not path]
    if len(found) == 1:
        return found[0]
    if not found:
        said = ", ".join(f"{each.module}:{name}" for each in named)
        msg = (
            f"accelfn has no function {text!r}{said and f', but {said}'}. Was it moved or"
            " renamed? Write module:name, such as averaging:ema.init."
        )
        raise LookupError(msg)
    said = ", ".join(each.module for each in found)
    msg = (
        f"accelfn has {len(found)} functions {text!r}, in {said}."
        f" Write a part of the module's path before the name, such as `step:{name}`."
    )
    raise LookupError(msg)


def all_places() -> list[Place]:
    """Return the functions of accelfn whose qualified name is unique in their module."""
    named = [found for module in _sources() for found in _functions(module).values()]
    return [found[0] for found in named if len(found) == 1]


def _cached_by_attrs(owner: Any) -> dict[str, FunctionType]:
    """Return the functions of cached properties, which attrs stores for a slotted class."""
    getter = owner.__getattr__
    getter = inspect.getclosurevars(getter).nonlocals.get("missing", getter)
    return getter.__globals__["cached_properties"]


@functools.cache
def _sources() -> dict[str, str]:
    """Return the source text of each module of accelfn."""
    paths = sorted(_ROOT.rglob("*.py"))
    return {_module_of(path): path.read_text() for path in paths}


def _module_of(path: Path) -> str:
    parts = path.relative_to(_ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def _modules_by_function() -> dict[str, list[str]]:
    """Return, by function name, the modules that may define the function (found by regex)."""
    found: dict[str, list[str]] = {}
    for module, text in _sources().items():
        for name in dict.fromkeys(re.findall(r"\bdef (\w+)", text)):
            found.setdefault(name, []).append(module)
    return found


@functools.cache
def _functions(module: str) -> dict[str, list[Place]]:
    """Return the functions of a module by qualified name."""
    found: dict[str, list[Place]] = {}
    text = _sources()[module]
    lines = text.split("\n")
    for name, node in _definitions(ast.parse(text), ""):
        source = "\n".join(lines[node.lineno - 1 : node.end_lineno])
        found.setdefault(name, []).append(Place(module, name, source))
    return found


def _definitions(node: Any, prefix: str) -> Iterator[tuple[str, Function]]:
    for each in ast.iter_child_nodes(node):
        if isinstance(each, ast.ClassDef):
            yield from _definitions(each, f"{prefix}{each.name}.")
        elif isinstance(each, Function):
            if not any(
                _NOT_THE_FUNCTION.search(ast.unparse(d)) for d in each.decorator_list
            ):
                yield f"{prefix}{each.name}", each
        elif isinstance(each, ast.stmt | ast.ExceptHandler):
            yield from _definitions(each, prefix)
