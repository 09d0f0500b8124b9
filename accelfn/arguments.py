# SPDX-License-Identifier: Apache-2.0
"""What many arguments have to be: integers from some number on, numbers, truths.

To Python True is an integer, 1; as an argument it is a slip, and refused.
"""

import inspect
from collections.abc import Callable
from typing import Any, TypeAlias, TypeGuard

from accelfn.errors import ArgumentError

Validator: TypeAlias = Callable[[Any, Any, Any], None]
"""One of attrs: called with a record, a field of it, and the field's value."""


def is_integer(value: object, least: int | None = None) -> TypeGuard[int]:
    """Return whether it is an integer, and not less than it may be."""
    if not isinstance(value, int) or isinstance(value, bool):
        return False
    return least is None or value >= least


def is_number(value: object) -> TypeGuard[float]:
    """Return whether it is an integer, or one of floating point."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def check_integer(
    call: str, name: str, value: object, least: int, what: str | None = None
) -> None:
    """Raise unless an argument is an integer of at least `least`.

    Args:
        call: what it is an argument of.
        name: its own.
        value: what was given.
        least: the first that there can be.
        what: what it is to who gives it, such as "a number of updates".

    Raises:
        ArgumentError: it is none.
    """
    if not is_integer(value, least):
        meant = "" if what is None else f"{what}: "
        msg = f"{call}({name}={value!r}): expected {meant}an integer, {least} or more."
        raise ArgumentError(msg)


def integer(least: int, what: str | None = None, *, within: str = "af.") -> Validator:
    """Return the validator of a field that is an integer of at least `least`.

    Args:
        least: the first that there can be.
        what: what it is to who gives it.
        within: what stands before the record's class in the user's code.
    """

    def check(owner: object, field: Any, value: object) -> None:
        check_integer(f"{within}{type(owner).__name__}", field.name, value, least, what)

    return check


def truth(*, within: str = "af.") -> Validator:
    """Return the validator of a field that is True or False.

    Args:
        within: what stands before the record's class in the user's code.
    """

    def check(owner: object, field: Any, value: object) -> None:
        if not isinstance(value, bool):
            call = f"{within}{type(owner).__name__}"
            msg = f"{call}({field.name}={value!r}): expected True or False."
            raise ArgumentError(msg)

    return check


def why_not(function: Callable[..., object], *given: object) -> TypeError | None:
    """Return why a function cannot be called with these, as far as its signature says."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # written in C, and not said
        return None
    try:
        signature.bind(*given)
    except TypeError as error:
        return error
    return None
