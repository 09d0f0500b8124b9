# SPDX-License-Identifier: Apache-2.0
"""Hints for names from PyTorch, Accelerate, Lightning, Transformers and Flax.

`hints.toml` maps names that accelfn does not have to the code to write. Each of its tables
belongs to a record, a module or a call. It is read after the first failure.
"""

import functools
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from accelfn.errors import CallError, RecordError

T = TypeVar("T", bound=type)


def find_hint(table: str, name: str) -> str | None:
    """Return the code to write instead of a name of another library; None if unknown."""
    return read_hints().get(table, {}).get(name)


@functools.cache
def read_hints() -> Mapping[str, Mapping[str, str]]:
    """Read the tables, with one entry per name."""
    text = Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
    return {
        table: {name: hint for key, hint in hints.items() for name in key.split()}
        for table, hints in tomllib.loads(text).items()
    }


def hint_attributes(*operations: str) -> Callable[[T], T]:
    """Make a class raise errors with hints for names and operations of other libraries.

    A missing attribute stays an AttributeError, so `hasattr`, `getattr` with a default, copy
    and pickle work. `dir`, `help` and completion show no foreign name.

    Args:
        *operations: the operations that raise: "setattr", "getitem", "iter".
    """

    def decorate(cls: T) -> T:
        kind: Any = cls
        missing = getattr(kind, "__getattr__", object.__getattribute__)
        kind.__getattr__ = _explain_missing(kind.__name__, missing)
        for operation in operations:
            if operation == "setattr":
                kind.__setattr__ = kind.__delattr__ = readonly(kind.__name__)
            else:
                setattr(kind, f"__{operation}__", _raise_hint(kind.__name__, operation))
        return cls

    return decorate


def _explain_missing(
    kind: str, missing: Callable[[Any, str], Any]
) -> Callable[[Any, str], Any]:
    def explain(self: object, name: str) -> Any:
        try:
            return missing(self, name)  # the error of a property, or Python's
        except AttributeError:
            hint = None if name.startswith("_") else find_hint(kind, name)
            if hint is None:
                raise
        msg = f"A {kind} has no {name}: {hint}."
        raise RecordError(msg, obj=type(self))  # `obj` stops Python from suggesting

    return explain


def _raise_hint(kind: str, operation: str) -> Callable[..., NoReturn]:
    def refuse(*_: object) -> NoReturn:
        msg = f"A {kind} is a record: {find_hint(kind, f'__{operation}__')}."
        raise CallError(msg)

    return refuse


def readonly(kind: str, hint: str | None = None) -> Callable[..., NoReturn]:
    """Return a `__setattr__` that raises an error with the code to write instead."""

    def refuse(self: object, name: str, *_: object) -> NoReturn:
        advice = hint or find_hint(kind, "__setattr__")
        msg = f"A {kind} is a value, whose {name} is not set: {advice}."
        raise RecordError(msg, obj=type(self))

    return refuse
