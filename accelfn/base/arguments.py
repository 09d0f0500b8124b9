# SPDX-License-Identifier: Apache-2.0
"""Argument checks, call errors, warnings, paths and byte counts shared by the package.

In Python True is also the integer 1. These checks reject a bool if a number is expected.
"""

import ast
import difflib
import errno
import functools
import html
import inspect
import math
import os
import re
import stat
import sys
import tomllib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, TypeGuard, TypeVar, cast

import attrs
import torch

from accelfn.errors import AccelfnWarning, ArgumentError, CallError, RecordError

if TYPE_CHECKING:
    from types import FrameType

# Hints for names that users know from PyTorch, Accelerate, Lightning, Transformers or Flax.
#
# `hints.toml` maps a name that accelfn does not have to the code to write. Each table belongs
# to a class, a module or a call. The file is read only after the first error.


T = TypeVar("T", bound=type)


def find_hint(table: str, name: str) -> str | None:
    """Return a hint for a name that the table's class or call lacks; None if unknown."""
    return read_hints().get(table, {}).get(name)


@functools.cache
def read_hints() -> Mapping[str, Mapping[str, str]]:
    """Read `hints.toml` as a dict from each table's name to the hints by name."""
    text = Path(__file__).with_name("hints.toml").read_text(encoding="utf-8")
    return {
        table: {name: hint for key, hint in hints.items() for name in key.split()}
        for table, hints in tomllib.loads(text).items()
    }


def hint_attributes(*operations: str) -> Callable[[T], T]:
    """Make a class explain wrong attributes and operations in its errors.

    A missing attribute stays an AttributeError, so `hasattr`, `getattr` with a default, copy
    and pickle work. `dir`, `help` and completion do not show the names with hints.

    Args:
        *operations: operations that always raise: "setattr", "getitem", "iter".
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
            return missing(self, name)  # raises Python's error, or a property's error
        except AttributeError:
            hint = None if name.startswith("_") else find_hint(kind, name)
            if hint is None:
                raise
        msg = f"A {kind} has no attribute {name}: {hint}."
        raise RecordError(msg, obj=type(self))  # `obj` avoids Python's own suggestion

    return explain


def _raise_hint(kind: str, operation: str) -> Callable[..., NoReturn]:
    def refuse(*_: object) -> NoReturn:
        hint = find_hint(kind, f"__{operation}__")
        msg = f"A {kind} cannot be indexed or iterated over: {hint}."
        raise CallError(msg)

    return refuse


def readonly(kind: str, hint: str | None = None) -> Callable[..., NoReturn]:
    """Return a `__setattr__` that raises an error with the code to write instead."""

    def refuse(self: object, name: str, *_: object) -> NoReturn:
        advice = hint or find_hint(kind, f"{name}=") or find_hint(kind, "__setattr__")
        msg = f"A {kind} is immutable, so you cannot set its {name}: {advice}."
        raise RecordError(msg, obj=type(self))

    return refuse


# Names, signatures and annotations of functions and classes.
#
# Since Python 3.14 an annotation is evaluated when it is read, and by default raises for a
# name imported under `TYPE_CHECKING`. Earlier versions raised at definition, or kept text.


if sys.version_info >= (3, 14):
    from functools import partial

    from annotationlib import Format, get_annotations

    annotations_of = partial(get_annotations, format=Format.FORWARDREF)
    signature = partial(inspect.signature, annotation_format=Format.FORWARDREF)
else:
    annotations_of = inspect.get_annotations
    signature = inspect.signature


def qualname(function: Any) -> str:
    """Return a function's qualified name, or the repr of a `partial` or another object.

    A wrapper with the attribute `__wrapped__` has the name of what it wraps.
    """
    while inner := getattr(function, "__wrapped__", None):
        function = inner
    return getattr(function, "__qualname__", None) or repr(function)


# Names that a module imports when a program first uses them.
#
# The module lists these names once, under `if TYPE_CHECKING`, so type checkers also see them.


@functools.cache
def names_for_later(module: str) -> Mapping[str, str]:
    """Return the names under a module's `if TYPE_CHECKING`, and where to import each name."""
    loader: Any = sys.modules[module].__loader__
    statements = ast.parse(loader.get_source(module)).body
    block = next(statement for statement in statements if isinstance(statement, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    return {node.names[0].name: cast("str", node.module) for node in imports}


def import_later(module: str, name: str) -> object:
    """Import a name of `names_for_later`, and store it in the module."""
    home = import_module(names_for_later(module)[name])
    # `vars`, because `getattr` would call the module's `__getattr__` for a missing name
    value = vars(home).get(name) or import_module(f"{home.__name__}.{name}")
    setattr(sys.modules[module], name, value)
    return value


Number: TypeAlias = float | torch.Tensor
Validator: TypeAlias = Callable[[Any, Any, Any], None]
"""An attrs validator: called with a record, its field and the field's value."""
_MAX_SECONDS = 10.0**9
"""Upper limit in seconds: 31 years, which a timedelta can represent."""


def is_integer(value: object, least: int | None = None) -> TypeGuard[int]:
    """Return whether a value is an integer of at least `least`; a bool is not."""
    if not isinstance(value, int) or isinstance(value, bool):
        return False
    return least is None or value >= least


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is an int or a float; a bool is not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_positive_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a finite number above 0; a bool is not."""
    return is_number(value) and 0 < value < math.inf


def is_word(value: object) -> TypeGuard[str]:
    """Return whether a value is non-empty text that UTF-8 can encode."""
    try:
        return isinstance(value, str) and bool(value.encode())
    except UnicodeEncodeError:  # half of a surrogate pair
        return False


def check_word(call: str, name: str, value: object, what: str) -> None:
    """Raise unless an argument is non-empty text.

    Args:
        call: the call that has the argument.
        name: the argument's name.
        value: the argument's value.
        what: a description of the argument for the error message, such as "a name".

    Raises:
        ArgumentError: the value is not text, is empty, or has half of a surrogate pair.
    """
    if not is_word(value):
        msg = f"{call}({name}={value!r}): expected a non-empty string, {what}."
        raise ArgumentError(msg)


def check_integer(
    call: str, name: str, value: object, least: int, what: str | None = None
) -> None:
    """Raise unless an argument is an integer of at least `least`.

    Args:
        call: the call that has the argument.
        name: the argument's name.
        value: the argument's value.
        least: the smallest valid value.
        what: a description of the argument for the error message, such as "a number of
            updates".

    Raises:
        ArgumentError: the value is not such an integer.
    """
    if not is_integer(value, least):
        meant = "" if what is None else f"{what}: "
        msg = f"{call}({name}={value!r}): expected {meant}an integer, {least} or more."
        raise ArgumentError(msg)


def check_sizes(call: str, values: object) -> None:
    """Raise unless `sizes=` is a sequence of numbers of ranks.

    Raises:
        ArgumentError: the value is not a sequence, is empty, or has an invalid number.
    """
    sizes = cast("Sequence[object]", values) if isinstance(values, Sequence) else ()
    if not sizes or not all(is_integer(size, 1) for size in sizes):
        msg = f"{call}(sizes={values!r}): expected numbers of ranks, such as [1, 2, 4]."
        raise ArgumentError(msg)


def check_seconds(call: str, name: str, value: object) -> None:
    """Raise unless an argument is a positive number of seconds.

    Raises:
        ArgumentError: the value is not a number above 0, or exceeds 31 years.
    """
    if not is_number(value) or not 0 < value < _MAX_SECONDS:
        msg = f"{call}({name}={value!r}): expected a positive number of seconds, below 1e9."
        raise ArgumentError(msg)


def integer(least: int, what: str | None = None, *, within: str = "af.") -> Validator:
    """Return an attrs validator for an integer of at least `least`.

    Args:
        least: the smallest valid value.
        what: a description of the field for the error message, such as "a number of updates".
        within: the text before the name of the field's class in the error.
    """

    def check(owner: object, field: Any, value: object) -> None:
        # a fast path, because every batch checks two fields
        if type(value) is int and value >= least:
            return
        check_integer(f"{within}{type(owner).__name__}", field.name, value, least, what)

    return check


def truth(*, within: str = "af.") -> Validator:
    """Return an attrs validator for True or False; `within` as for `satisfies`."""
    return satisfies(
        lambda value: isinstance(value, bool), "True or False", within=within
    )


def satisfies(
    is_valid: Callable[[Any], bool], expected: str, *, within: str = "af."
) -> Validator:
    """Return an attrs validator that calls `is_valid` with the value.

    Args:
        is_valid: returns whether a value is valid.
        expected: the valid values, for the error.
        within: the text before the name of the field's class in the error.
    """

    def check(owner: object, field: Any, value: object) -> None:
        if not is_valid(value):
            call = f"{within}{type(owner).__name__}({field.name}={value!r})"
            msg = f"{call}: expected {expected}."
            raise ArgumentError(msg)

    return check


def number(is_valid: Callable[[float], bool], text: str) -> Validator:
    """Return an attrs validator for a number, like `satisfies`."""
    return satisfies(lambda value: is_number(value) and is_valid(value), text)


def one_of(*choices: object, within: str = "af.") -> Any:
    """Return an attrs validator that accepts only these choices."""
    names = " or ".join(map(repr, choices))
    return satisfies(lambda value: value in choices, names, within=within)


def option(default: Any, validator: Validator | None = None, **more: Any) -> Any:
    """Return an attrs field for a keyword-only option; `more` goes to `attrs.field`."""
    return attrs.field(default=default, validator=validator, kw_only=True, **more)


def option_of(
    field: str, choice: str, validator: Validator, usual: object = None
) -> Any:
    """Return an attrs field for an option that needs this choice of another field.

    The default is None, and `value_of` then returns `usual`.
    """

    def check(owner: Any, option: Any, value: object) -> None:
        if value is None:
            return
        chosen = getattr(owner, field)
        if chosen != choice:
            call = f"af.{type(owner).__name__}({chosen!r}, {option.name}={value!r})"
            msg = f"{call}: {option.name} is only for {choice!r}. Remove {option.name}."
            raise ArgumentError(msg)
        validator(owner, option, value)

    metadata = {"usual": usual}
    return attrs.field(default=None, validator=check, kw_only=True, metadata=metadata)


def value_of(owner: Any, name: str) -> Any:
    """Return the value of an `option_of` of a record, and `usual` instead of None."""
    usual = getattr(attrs.fields(type(owner)), name).metadata["usual"]
    return usual if getattr(owner, name) is None else getattr(owner, name)


def mebibytes() -> Validator:
    """Return an attrs validator for a transform's size in MiB."""
    return satisfies(is_positive_number, "a positive number of MiB")


def as_path(call: str, value: object, what: str) -> Path:
    """Return an argument as a path.

    Args:
        call: the call that has the argument.
        value: the argument's value.
        what: the expected kind of path for the error, such as "a directory".

    Raises:
        ArgumentError: the value is not a path, or no file system accepts it.
    """
    with suppress(TypeError, UnicodeEncodeError):  # no path, half of a surrogate pair
        path = Path(cast("str", value))
        if b"\0" not in os.fsencode(path):
            return path
    text = repr(value) if isinstance(value, (str, bytes)) else type(value).__name__
    msg = f"{call}: expected the path of {what}, got {text}."
    raise ArgumentError(msg)


def call_mismatch(
    function: Callable[..., object], /, *args: object, **kwargs: object
) -> TypeError | None:
    """Return the TypeError if arguments do not fit a function's signature; None if they fit."""
    try:
        params = signature(function)
    except (TypeError, ValueError):  # a C function without a signature
        return None
    try:
        params.bind(*args, **kwargs)
    except TypeError as error:
        return error
    return None


# Path checks that raise disk errors.
#
# Since Python 3.14 pathlib's `exists`, `is_dir` and `is_file` return False for any disk
# error, so a store on a failed disk would look empty.


_MISSING_ERRORS = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}
"""Error numbers of the operating system that mean: the path does not exist."""


def exists(path: Path) -> bool:
    """Return whether a path exists.

    Raises:
        OSError: the disk failed.
    """
    return _mode(path) is not None


def is_directory(path: Path) -> bool:
    """Return whether a path is a directory.

    Raises:
        OSError: the disk failed.
    """
    return stat.S_ISDIR(_mode(path) or 0)


def is_file(path: Path) -> bool:
    """Return whether a path is a regular file.

    Raises:
        OSError: the disk failed.
    """
    return stat.S_ISREG(_mode(path) or 0)


def _mode(path: Path) -> int | None:
    try:
        return path.stat().st_mode
    except ValueError:  # file names cannot contain a zero byte
        return None
    except OSError as error:
        if error.errno in _MISSING_ERRORS:
            return None
        raise


# Errors for calls with a surplus, missing or misnamed argument.
#
# After such a call, a function or class under `@explain_call_errors` raises an error with the
# code to write. Cost: one more Python frame per call. The signature is read only after an
# error.


F = TypeVar("F", bound=Callable[..., Any])
_MAX_ARGUMENT = 30
"""Errors show an argument's value if it has at most this many characters."""
_BY_NAME = inspect.Parameter.KEYWORD_ONLY
_BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)
_PREFIXES = {
    "accelfn.schedules": "af.schedules.",
    "accelfn.orders": "af.orders.",
    "accelfn.track": "af.track.",
    "accelfn.testing": "testing.",
    "accelfn": "af.",
}


def explain_call_errors(target: F) -> F:
    """Make a function or class raise `CallError` if the arguments do not fit its signature.

    Law: any other call behaves the same as without this decorator.
    """
    if not isinstance(target, type):
        return cast("F", _wrap_call(target, name_of(target)))
    kind = cast("Any", target)
    kind.__init__ = _wrap_call(kind.__init__, name_of(target))
    return cast("F", kind)


def name_of(target: Callable[..., Any]) -> str:
    """Return the name that a user writes for a function or class, such as `af.save`."""
    module = f"{target.__module__}."
    prefix = next(
        (_PREFIXES[key] for key in _PREFIXES if module.startswith(f"{key}.")), ""
    )
    return prefix + target.__qualname__.rpartition("<locals>.")[2]


def _wrap_call(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except TypeError:
            mismatch = call_mismatch(function, *args, **kwargs)
            if mismatch is None:
                raise
            msg = _describe_mismatch(function, name, args, kwargs, mismatch)
        raise CallError(msg) from None

    return call


def _describe_mismatch(
    function: Callable[..., Any],
    name: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    error: TypeError,
) -> str:
    """Return the error text of a wrong call, with the code to write."""
    all_params = list(signature(function).parameters.values())
    if all_params and all_params[0].name in ("self", "cls"):
        all_params, args = all_params[1:], args[1:]
    params = [param for param in all_params if param.kind is not param.VAR_KEYWORD]
    names = [param.name for param in params]
    arguments = [*map(_format_argument, args), *_format_keywords(kwargs.items())]
    begin = f"{name}({', '.join(arguments)}):"
    unknown = [kwarg for kwarg in kwargs if kwarg not in names]
    if unknown and len(params) == len(all_params):
        return f"{begin} {_suggest_name(name, unknown[0], params)}"
    by_position = [param.name for param in params if param.kind is not _BY_NAME]
    has_rest = any(param.kind is param.VAR_POSITIONAL for param in params)
    if len(args) > len(by_position) and not has_rest:
        surplus = args[len(by_position) :]
        is_mistaken = any(map(_is_torchs, args)) or not all(map(_is_plain, surplus))
        if is_mistaken and (advice := find_hint("calls", name)):
            return f"{begin} {advice}."
        by_name = [name for name in names if name not in by_position]
        return f"{begin} {_suggest_keywords(name, surplus, by_position, by_name)}"
    return f"{begin} {error}. Write {_usage(name, params)}."


def _suggest_keywords(
    name: str, surplus: tuple[Any, ...], by_position: list[str], by_name: list[str]
) -> str:
    """Return the error text for too many positional arguments, with keywords to write."""
    positional = f"only {' and '.join(by_position)}" if by_position else "no argument"
    free = [name for name in by_name if name != "name"]
    if len(surplus) <= len(free) and all(map(_is_plain, surplus)):
        arguments = _format_keywords(zip(free, surplus, strict=False))
        usage = f"Write {name}({', '.join([*by_position, *arguments])})"
    else:
        keywords = ", ".join(f"{name}=" for name in by_name)
        usage = f"Pass these by name: {keywords}" if keywords else "Remove the others"
    return f"{positional} can be passed by position. {usage}."


def _suggest_name(name: str, word: str, params: list[inspect.Parameter]) -> str:
    """Return the error text for an unknown keyword argument, with the nearest known name."""
    keywords = [param.name for param in params if param.kind not in _BY_PLACE]
    matches = difflib.get_close_matches(word, keywords, n=1)
    advice = find_hint(name, word) or "".join(f"{match}=" for match in matches)
    if advice in [f"{keyword}=" for keyword in keywords]:
        return f"there is no argument {word}=; did you mean {advice}?"
    usage = ", ".join(map(_format_param, params)) or "no argument"
    return f"there is no argument {word}=; {advice or f'{name} accepts {usage}'}."


def _format_param(param: inspect.Parameter) -> str:
    """Return a parameter as it appears in a call: `name`, `name=` or `*name`."""
    if param.kind is param.VAR_POSITIONAL:
        return f"*{param.name}"
    return param.name if param.kind in _BY_PLACE else f"{param.name}="


def _usage(name: str, params: list[inspect.Parameter]) -> str:
    """Return the shortest valid call, or the call that users should make instead."""
    if made_by := find_hint("constructors", name):
        return made_by
    arguments = [
        f"{p.name}=..." if p.kind is _BY_NAME else _format_param(p).removesuffix("=")
        for p in params
        if p.default is p.empty
    ]
    return f"{name}({', '.join(arguments)})"


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))


def _is_torchs(value: object) -> bool:
    """Whether a value is a module, an optimizer, or parameters of a module."""
    return isinstance(value, (torch.nn.Module, torch.optim.Optimizer, Iterator))


def _format_keywords(pairs: Iterable[tuple[str, object]]) -> list[str]:
    return [f"{name}={_format_argument(value)}" for name, value in pairs]


def _format_argument(value: object) -> str:
    if _is_plain(value):
        text = repr(value)
        if len(text) <= _MAX_ARGUMENT:
            return text
    if isinstance(value, type):
        return value.__name__
    return f"<{type(value).__name__}>"


def package(module: str, *, call: str, extra: str, error: type[Exception]) -> Any:
    """Import a module that an optional extra of accelfn installs.

    Raises:
        error: the module cannot be imported; the message says what to install.
    """
    try:
        return import_module(module)
    except ImportError as cause:
        msg = (
            f"{call}: the module {module} cannot be imported ({cause}). Install it:"
            f' python -m pip install "accelfn[{extra}]".'
        )
        raise error(msg) from cause


# Warnings about valid calls that are likely mistakes.
#
# All these warnings have the class `AccelfnWarning`. To turn these warnings into errors, call
# `warnings.simplefilter("error", af.errors.AccelfnWarning)`. Python shows a warning once per
# line of the user's code.


_OWN = f"{Path(__file__).parents[1]}{os.sep}", "<attrs generated methods accelfn."
"""How the file names of this package's code begin; attrs generates code too."""


def advise(message: str) -> None:
    """Warn of a likely mistake; the warning shows the line of the user's code."""
    warnings.warn(message, AccelfnWarning, stacklevel=_levels_of_package() + 1)


def _levels_of_package() -> int:
    """Count the frames of this package between `advise` and the user's code."""
    frame: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    levels = 0
    while frame is not None and frame.f_code.co_filename.startswith(_OWN):
        frame, levels = frame.f_back, levels + 1
    return levels


def text_as_html(record: object) -> str:
    """Return `str(record)` as HTML for notebooks. Use: `_repr_html_ = text_as_html`."""
    return f"<pre>{html.escape(str(record))}</pre>"


# Conversion between numbers of bytes and text.


_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([KMGT]i?)?B")
_POWERS = {"K": 1, "M": 2, "G": 3, "T": 4}


def parse_bytes(shown: str, size: object) -> int:
    """Parse a number of bytes, given as an integer or as text: "5GB", "100MiB".

    Raises:
        ArgumentError: the size is not such an integer or text, or is less than 1.
    """
    count = size if is_integer(size) else 0
    match = _SIZE.fullmatch(size) if isinstance(size, str) else None
    if match:
        unit = match[2] or ""
        base = 1024 if unit.endswith("i") else 1000
        count = int(float(match[1]) * base ** _POWERS.get(unit[:1], 0))
    if count < 1:
        msg = f'{shown}: expected an integer number of bytes, or text such as "5GB" or "100MiB".'
        raise ArgumentError(msg)
    return count


def list_names(names: Sequence[str]) -> str:
    """Return the first ten names as text, and the number of further names.

    Long names are truncated, because a name from a file can have any length.
    """
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return ", ".join(name[:200] for name in names[:10]) + more


def format_bytes(size: float) -> str:
    """Format a number of bytes with a suitable unit, such as "1.50 GiB"."""
    unit = 0
    while size >= 1024 and unit + 1 < len(_UNITS):
        size, unit = size / 1024, unit + 1
    return f"{size:.2f} {_UNITS[unit]}" if unit else f"{size:.0f} B"
