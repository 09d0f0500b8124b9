# SPDX-License-Identifier: Apache-2.0
"""What many arguments have to be: integers from some number on, numbers, truths.

To Python True is an integer, 1; as an argument it is a slip, and refused.
"""

import difflib
import errno
import functools
import inspect
import math
import os
import stat
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, TypeGuard, TypeVar, cast

import attrs
import torch

from accelfn.base.words import ARGUMENTS, MADE_BY
from accelfn.errors import ArgumentError, CallError
from accelfn.errors import Warning as AdviceWarning

if TYPE_CHECKING:
    from types import FrameType

# What a function or a class says of itself: its name, its signature, its annotations.
#
# Since Python 3.14 an annotation is evaluated when it is read, and by default raises for a
# name that was imported under `TYPE_CHECKING`; before, the annotation itself raised, or was
# a text.


if sys.version_info >= (3, 14):
    from functools import partial

    from annotationlib import Format, get_annotations

    annotations_of = partial(get_annotations, format=Format.FORWARDREF)
    signature = partial(inspect.signature, annotation_format=Format.FORWARDREF)
else:
    annotations_of = inspect.get_annotations
    signature = inspect.signature


def qualname(function: Any) -> str:
    """Return a function's qualified name; of what has none, as a `partial`, its repr."""
    return getattr(function, "__qualname__", None) or repr(function)


Number: TypeAlias = float | torch.Tensor
Validator: TypeAlias = Callable[[Any, Any, Any], None]
"""One of attrs: called with a record, a field of it, and the field's value."""
_MAX_SECONDS = 10.0**9
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
    if not is_number(value) or not 0 < value < _MAX_SECONDS:
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


def call_mismatch(
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


# What the disk says of a path, or that it says nothing.
#
# From Python 3.14 on pathlib's `exists`, `is_dir` and `is_file` take any error of the disk
# for no: checkpoints on a disk that has failed would be none.


_MISSING_ERRORS = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}
"""What the disk says where nothing is."""


def exists(path: Path) -> bool:
    """Return whether something is there.

    Raises:
        OSError: the disk does not say.
    """
    return _mode(path) is not None


def is_directory(path: Path) -> bool:
    """Return whether a directory is there.

    Raises:
        OSError: the disk does not say.
    """
    return stat.S_ISDIR(_mode(path) or 0)


def is_file(path: Path) -> bool:
    """Return whether a file is there, and no directory or device.

    Raises:
        OSError: the disk does not say.
    """
    return stat.S_ISREG(_mode(path) or 0)


def _mode(path: Path) -> int | None:
    try:
        return path.stat().st_mode
    except ValueError:  # no name of a file has a zero byte
        return None
    except OSError as error:
        if error.errno in _MISSING_ERRORS:
            return None
        raise


# Calls that Python cannot bind, refused in the words of the user's code.
#
# A function or class under `@called` says of an argument too many, missing, or of another
# library's name, what to write. It costs a frame a call, and looks only when a call has
# failed.


F = TypeVar("F", bound=Callable[..., Any])
_MAX_ARGUMENT = 30
"""The longest argument that is shown as it is."""
_BY_NAME = inspect.Parameter.KEYWORD_ONLY
_BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)
_PREFIXES = {
    "accelfn.schedules": "af.schedules.",
    "accelfn.orders": "af.orders.",
    "accelfn.track": "af.track.",
    "accelfn.testing": "testing.",
    "accelfn": "af.",
}


def explain_call_errors(what: F) -> F:
    """Let a wrong call of a function, or of a class, raise `CallError`.

    Law: a call that Python can bind does what it does without this.
    """
    if not isinstance(what, type):
        return cast("F", _wrap_call(what, name_of(what)))
    kind = cast("Any", what)
    kind.__init__ = _wrap_call(kind.__init__, name_of(what))
    return cast("F", kind)


def name_of(what: Callable[..., Any]) -> str:
    """Return what the user's code calls a function or class."""
    module = f"{what.__module__}."
    home = next(
        (_PREFIXES[each] for each in _PREFIXES if module.startswith(f"{each}.")), ""
    )
    return home + what.__qualname__.rpartition("<locals>.")[2]


def _wrap_call(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        try:
            return function(*given, **named)
        except TypeError:
            if call_mismatch(function, *given, **named) is None:
                raise
            msg = _describe_mismatch(function, name, given, named)
        raise CallError(msg) from None

    return call


def _describe_mismatch(
    function: Callable[..., Any],
    name: str,
    given: tuple[Any, ...],
    named: Mapping[str, Any],
) -> str:
    """Return what is wrong with a call, and how to write it."""
    all_params = list(signature(function).parameters.values())
    if all_params and all_params[0].name in ("self", "cls"):
        all_params, given = all_params[1:], given[1:]
    params = [each for each in all_params if each.kind is not each.VAR_KEYWORD]
    names = [each.name for each in params]
    shown = ", ".join(
        [
            *map(_format_argument, given),
            *(f"{n}={_format_argument(v)}" for n, v in named.items()),
        ]
    )
    begin = f"{name}({shown}):"
    unknown = [each for each in named if each not in names]
    if unknown and len(params) == len(all_params):
        return f"{begin} {_suggest_name(name, unknown[0], params)}"
    by_position = [each.name for each in params if each.kind is not _BY_NAME]
    has_rest = any(each.kind is each.VAR_POSITIONAL for each in params)
    if len(given) > len(by_position) and not has_rest:
        return f"{begin} {_suggest_keywords(name, given, by_position, names)}"
    usage = _usage(name, params)
    placed = [each.name for each in params if each.kind in _BY_PLACE]
    unnamed = [each for each in named if each in placed]
    if unnamed and len(params) == len(all_params):
        return f"{begin} {unnamed[0]} has no name in a call. Write {usage}."
    twice = [each for each in by_position[: len(given)] if each in named]
    if twice:
        return f"{begin} {twice[0]} is given twice. Write {usage}."
    missing = [
        each.name
        for each in params
        if each.default is each.empty
        and each.kind is not each.VAR_POSITIONAL
        and each.name not in by_position[: len(given)]
        and each.name not in named
    ]
    verb = "is" if len(missing) == 1 else "are"
    return f"{begin} {' and '.join(missing)} {verb} missing. Write {usage}."


def _suggest_keywords(
    name: str, given: tuple[Any, ...], by_position: list[str], names: list[str]
) -> str:
    """Return how to write what was given by position, and cannot be."""
    may = f"only {' and '.join(by_position)}" if by_position else "no argument"
    surplus = given[len(by_position) :]
    others = [each for each in names if each not in by_position and each != "name"]
    written = [*by_position]
    written += [
        f"{n}={_format_argument(v)}" for n, v in zip(others, surplus, strict=False)
    ]
    if len(surplus) <= len(others) and all(map(_is_plain, surplus)):
        usage = f"Write {name}({', '.join(written)})"
    else:
        listed = ", ".join(f"{each}=" for each in names if each not in by_position)
        usage = f"By name: {listed or 'none'}"
    return f"{may} may be given by position. {usage}."


def _suggest_name(name: str, word: str, params: list[inspect.Parameter]) -> str:
    """Return what to write instead of an argument that there is not."""
    known = [each.name for each in params if each.kind not in _BY_PLACE]
    advice = ARGUMENTS.get(name, {}).get(word)
    if advice is None:
        near = difflib.get_close_matches(word, known, n=1)
        advice = f"{near[0]}=" if near else None
    if advice is None:
        listed = ", ".join(map(_join_names, params)) or "none"
        return f"there is no {word}=; its arguments are {listed}."
    if advice in [f"{each}=" for each in known]:
        return f"there is no {word}=; did you mean {advice}?"
    return f"there is no {word}=; {advice}."


def _join_names(param: inspect.Parameter) -> str:
    """Return a parameter as one gives it."""
    if param.kind is param.VAR_POSITIONAL:
        return f"*{param.name}"
    return param.name if param.kind in _BY_PLACE else f"{param.name}="


def _usage(name: str, params: list[inspect.Parameter]) -> str:
    """Return the shortest call that can be, or the one that makes what this one is not for."""
    if name in MADE_BY:
        return MADE_BY[name]
    needed: list[str] = []
    for each in params:
        if each.kind is each.VAR_POSITIONAL:
            needed.append(f"*{each.name}")
        elif each.default is each.empty:
            needed.append(f"{each.name}=..." if each.kind is _BY_NAME else each.name)
    return f"{name}({', '.join(needed)})"


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))


def _format_argument(value: object) -> str:
    if _is_plain(value):
        text = repr(value)
        if len(text) <= _MAX_ARGUMENT:
            return text
    if isinstance(value, type):
        return value.__name__
    return f"<{type(value).__name__}>"


# Methods that answer yes or no, and are not taken for their answer.


def question(method: F) -> F:
    """Let a condition that leaves out the method's parentheses raise `CallError`.

    `if store.due:` would hold always, for a method is true.

    Law: called, the method does what it does without this.
    """
    return cast("F", _UncalledGuard(method))


class _UncalledGuard:
    """In a class, in the place of a method."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method
        functools.update_wrapper(cast("Any", self), method)

    def __get__(self, record: object, kind: type | None = None) -> Callable[..., Any]:
        return self._method if record is None else _GuardedMethod(self._method, record)


class _GuardedMethod:
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


# Warnings that teach: what runs, but is likely not what was meant, and the line to write.
#
# All are `af.Warning`, so one filter takes them: `warnings.simplefilter("error",
# af.Warning)` makes each an error. Python says one once for the line of the user's that it
# is about.


_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"


def advise(message: str) -> None:
    """Warn of a likely mistake, at the line of the user's own code that led to it."""
    warnings.warn(message, AdviceWarning, stacklevel=_levels_of_package() + 1)


def _levels_of_package() -> int:
    """Return how many of the innermost frames are the package's own, `advise` the first."""
    frame: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    levels = 0
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame, levels = frame.f_back, levels + 1
    return levels


# Numbers of bytes, in words.


_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def format_bytes(size: float) -> str:
    """Show a number of bytes in the unit that fits."""
    unit = 0
    while size >= 1024 and unit + 1 < len(_UNITS):
        size, unit = size / 1024, unit + 1
    return f"{size:.2f} {_UNITS[unit]}" if unit else f"{size:.0f} B"
