# SPDX-License-Identifier: Apache-2.0
"""What many arguments have to be: integers from some number on, numbers, truths.

To Python True is an integer, 1; as an argument it is a slip, and refused.
"""

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeGuard, cast

import attrs
import torch

from accelfn.base.signatures import signature
from accelfn.errors import ArgumentError

Number: TypeAlias = float | torch.Tensor
Validator: TypeAlias = Callable[[Any, Any, Any], None]
"""One of attrs: called with a record, a field of it, and the field's value."""
_LONGEST = 10.0**9
"""Seconds; what a timedelta can hold, and 31 years."""


def is_integer(value: object, least: int | None = None) -> TypeGuard[int]:
    """Return whether it is an integer, and not less than it may be."""
    if not isinstance(value, int) or isinstance(value, bool):
        return False
    return least is None or value >= least


def is_number(value: object) -> TypeGuard[float]:
    """Return whether it is an integer, or one of floating point."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_word(value: object) -> TypeGuard[str]:
    """Return whether it is text, of some length, that can be written to a file."""
    try:
        return isinstance(value, str) and bool(value.encode())
    except UnicodeEncodeError:  # half of a surrogate pair
        return False


def check_word(call: str, name: str, value: object, what: str) -> None:
    """Raise unless an argument is text that names something.

    Args:
        call: what it is an argument of.
        name: its own.
        value: what was given.
        what: what it names.

    Raises:
        ArgumentError: it is something else, empty, or has half of a surrogate pair.
    """
    if not is_word(value):
        msg = f"{call}({name}={value!r}): expected text, {what}."
        raise ArgumentError(msg)


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


def check_sizes(call: str, values: object) -> None:
    """Raise unless `sizes=` says in how many ranks something is tried.

    Raises:
        ArgumentError: it is no sequence, has nothing, or what is no number of ranks.
    """
    is_several = isinstance(values, Sequence) and not isinstance(values, str)
    sizes = cast("Sequence[object]", values) if is_several else ()
    if not sizes or not all(is_integer(each, 1) for each in sizes):
        msg = (
            f"{call}(sizes={values!r}): expected numbers of ranks, each 1 or more, such as"
            " sizes=[1, 2, 4]."
        )
        raise ArgumentError(msg)


def check_seconds(call: str, name: str, value: object) -> None:
    """Raise unless an argument is how long to wait.

    Raises:
        ArgumentError: it is no number above 0, or longer than 31 years.
    """
    if not is_number(value) or not 0 < value < _LONGEST:
        msg = f"{call}({name}={value!r}): expected a positive number of seconds."
        raise ArgumentError(msg)


def integer(least: int, what: str | None = None, *, within: str = "af.") -> Validator:
    """Return the validator of a field that is an integer of at least `least`.

    Args:
        least: the first that there can be.
        what: what it is to who gives it.
        within: what stands before the record's class in the user's code.
    """

    def check(owner: object, field: Any, value: object) -> None:
        if type(value) is int and value >= least:  # as of two fields at every batch
            return
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


def option(default: Any, validator: Validator | None = None, **more: Any) -> Any:
    """Return the field of an option that is given by its name alone; `more` is attrs' own."""
    return attrs.field(default=default, validator=validator, kw_only=True, **more)


def mebibytes() -> Validator:
    """Return the validator of a field that is a size in MiB, of a transform."""

    def check(owner: object, field: Any, value: object) -> None:
        if not is_number(value) or not 0 < value < math.inf:
            call = f"af.{type(owner).__name__}"
            msg = f"{call}({field.name}={value!r}): expected a positive number of MiB."
            raise ArgumentError(msg)

    return check


def as_path(call: str, value: object, what: str) -> Path:
    """Return the path that an argument is.

    Args:
        call: what it is an argument of.
        value: what was given.
        what: what it is to be the path of, such as "a directory".

    Raises:
        ArgumentError: it is none, or no system could have it.
    """
    try:
        path = Path(cast("str", value))
        os.fsencode(path)
        fits = "\0" not in str(path)
    except (TypeError, UnicodeEncodeError):  # half of a surrogate pair
        path, fits = Path(), False
    if not fits:
        shown = repr(value) if isinstance(value, (str, bytes)) else type(value).__name__
        msg = f"{call}: expected the path of {what}, got {shown}."
        raise ArgumentError(msg)
    return path


def why_not(
    function: Callable[..., object], /, *given: object, **named: object
) -> TypeError | None:
    """Return why a function cannot be called with these, as far as its signature says."""
    try:
        taken = signature(function)
    except (TypeError, ValueError):  # written in C, and not said
        return None
    try:
        taken.bind(*given, **named)
    except TypeError as error:
        return error
    return None
