# SPDX-License-Identifier: Apache-2.0
"""Methods that answer yes or no, and are not taken for their answer."""

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any, NoReturn, TypeVar, cast

from accelfn.base.calling import name_of
from accelfn.errors import CallError

F = TypeVar("F", bound=Callable[..., Any])


def question(method: F) -> F:
    """Let a condition that leaves out the method's parentheses raise `CallError`.

    `if store.due:` would hold always, for a method is true.

    Law: called, the method does what it does without this.
    """
    return cast("F", _Question(method))


class _Question:
    """In a class, in the place of a method."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method
        functools.update_wrapper(cast("Any", self), method)

    def __get__(self, record: object, kind: type | None = None) -> Callable[..., Any]:
        return self._method if record is None else _Asked(self._method, record)


class _Asked:
    """A method of one record, which has no truth of its own."""

    def __init__(self, method: Callable[..., Any], record: object) -> None:
        self._bound = MethodType(method, record)
        functools.update_wrapper(self, self._bound)

    def __call__(self, *given: Any, **named: Any) -> Any:
        return self._bound(*given, **named)

    def __bool__(self) -> NoReturn:
        msg = (
            f"{name_of(self._bound)} is asked without being called: a method is always true."
            " Write its parentheses."
        )
        raise CallError(msg)

    def __repr__(self) -> str:
        return repr(self._bound)
