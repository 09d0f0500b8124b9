# SPDX-License-Identifier: Apache-2.0
"""Calls that Python cannot bind, refused in the words of the user's code.

A function or class under `@called` says of an argument too many, missing, or of another
library's name, what to write. It costs a frame a call, and looks only when a call has failed.
"""

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from accelfn.base.arguments import why_not
from accelfn.base.signatures import signature
from accelfn.base.words import ARGUMENTS, MADE_BY
from accelfn.errors import CallError

F = TypeVar("F", bound=Callable[..., Any])
_SHOWN = 30
"""The longest argument that is shown as it is."""
_BY_NAME = inspect.Parameter.KEYWORD_ONLY
_BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)
_HOMES = {
    "accelfn.schedules": "af.schedules.",
    "accelfn.data.orders": "af.orders.",
    "accelfn.track": "af.track.",
    "accelfn.testing": "testing.",
    "accelfn": "af.",
}


def called(what: F) -> F:
    """Let a wrong call of a function, or of a class, raise `CallError`.

    Law: a call that Python can bind does what it does without this.
    """
    if not isinstance(what, type):
        return cast("F", _told(what, name_of(what)))
    kind = cast("Any", what)
    kind.__init__ = _told(kind.__init__, name_of(what))
    return cast("F", kind)


def name_of(what: Callable[..., Any]) -> str:
    """Return what the user's code calls a function or class."""
    module = f"{what.__module__}."
    home = next((_HOMES[each] for each in _HOMES if module.startswith(f"{each}.")), "")
    return home + what.__qualname__.rpartition("<locals>.")[2]


def _told(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        try:
            return function(*given, **named)
        except TypeError:
            if why_not(function, *given, **named) is None:
                raise
            msg = _refusal(function, name, given, named)
        raise CallError(msg) from None

    return call


def _refusal(
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
        [*map(_shown, given), *(f"{n}={_shown(v)}" for n, v in named.items())]
    )
    begin = f"{name}({shown}):"
    unknown = [each for each in named if each not in names]
    if unknown and len(params) == len(all_params):
        return f"{begin} {_meant(name, unknown[0], params)}"
    by_position = [each.name for each in params if each.kind is not _BY_NAME]
    has_rest = any(each.kind is each.VAR_POSITIONAL for each in params)
    if len(given) > len(by_position) and not has_rest:
        return f"{begin} {_by_name(name, given, by_position, names)}"
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


def _by_name(
    name: str, given: tuple[Any, ...], by_position: list[str], names: list[str]
) -> str:
    """Return how to write what was given by position, and cannot be."""
    may = f"only {' and '.join(by_position)}" if by_position else "no argument"
    surplus = given[len(by_position) :]
    others = [each for each in names if each not in by_position and each != "name"]
    written = [*by_position]
    written += [f"{n}={_shown(v)}" for n, v in zip(others, surplus, strict=False)]
    if len(surplus) <= len(others) and all(map(_is_plain, surplus)):
        usage = f"Write {name}({', '.join(written)})"
    else:
        listed = ", ".join(f"{each}=" for each in names if each not in by_position)
        usage = f"By name: {listed or 'none'}"
    return f"{may} may be given by position. {usage}."


def _meant(name: str, word: str, params: list[inspect.Parameter]) -> str:
    """Return what to write instead of an argument that there is not."""
    known = [each.name for each in params if each.kind not in _BY_PLACE]
    advice = ARGUMENTS.get(name, {}).get(word)
    if advice is None:
        near = difflib.get_close_matches(word, known, n=1)
        advice = f"{near[0]}=" if near else None
    if advice is None:
        listed = ", ".join(map(_listed, params)) or "none"
        return f"there is no {word}=; its arguments are {listed}."
    if advice in [f"{each}=" for each in known]:
        return f"there is no {word}=; did you mean {advice}?"
    return f"there is no {word}=; {advice}."


def _listed(param: inspect.Parameter) -> str:
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


def _shown(value: object) -> str:
    if _is_plain(value):
        text = repr(value)
        if len(text) <= _SHOWN:
            return text
    if isinstance(value, type):
        return value.__name__
    return f"<{type(value).__name__}>"
