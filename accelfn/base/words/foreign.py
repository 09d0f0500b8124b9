# SPDX-License-Identifier: Apache-2.0
"""How a record says what is written here for a word of others."""

from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

from accelfn.errors import CallError, RecordError

T = TypeVar("T", bound=type)
Words = Mapping[str, str]


def each_word(words: Mapping[str, str]) -> dict[str, str]:
    """Return a table whose keys name several words as one of single words."""
    return {word: advice for key, advice in words.items() for word in key.split()}


class Word:
    """An attribute that a record does not have, and what to write instead.

    It is an error that `hasattr`, `getattr` with a default, copy and pickle understand, and
    costs the other attributes nothing, as a `__getattr__` would.
    """

    def __init__(self, name: str, advice: str) -> None:
        """Take the word, and what to write."""
        self._name, self._advice = name, advice

    def __get__(self, record: object, owner: type) -> NoReturn:
        """Refuse to be read."""
        msg = f"A {owner.__name__} has no {self._name}: {self._advice}."
        raise RecordError(msg, obj=owner)  # told by us; Python would guess at a name


def foreign(
    attributes: Words, *, changes: str | None = None, **operations: str
) -> Callable[[T], T]:
    """Let a record say what is written here for what others would write.

    Args:
        attributes: what to write, by an attribute that there is not.
        changes: what to write instead of setting an attribute.
        **operations: what to write, by an operation: `getitem`, `iter`.
    """

    def taught(cls: T) -> T:
        kind: Any = cls
        for name, advice in attributes.items():
            setattr(kind, name, Word(name, advice))
        kind.__dir__ = _without(attributes)
        if hasattr(kind, "__getattr__"):  # which Python asks after the word has refused
            kind.__getattr__ = _asked_after(kind.__getattr__, attributes)
        for name, advice in operations.items():
            setattr(kind, f"__{name}__", _refusing(kind.__name__, advice))
        if changes is not None:
            kind.__setattr__ = kind.__delattr__ = keeping(kind.__name__, changes)
        return cls

    return taught


def _without(attributes: Words) -> Callable[[object], list[str]]:
    def names(self: object) -> list[str]:
        return [name for name in object.__dir__(self) if name not in attributes]

    return names


def _asked_after(
    inner: Callable[[Any, str], Any], attributes: Words
) -> Callable[[Any, str], Any]:
    def getattr_(self: Any, name: str) -> Any:
        if name in attributes:
            Word(name, attributes[name]).__get__(self, type(self))
        return inner(self, name)

    return getattr_


def _refusing(kind: str, advice: str) -> Callable[..., NoReturn]:
    def refuse(*_: object) -> NoReturn:
        msg = f"A {kind} is a record: {advice}."
        raise CallError(msg)

    return refuse


def keeping(kind: str, advice: str) -> Callable[..., NoReturn]:
    """Return a `__setattr__` that refuses, and says what to write instead."""

    def refuse(self: object, name: str, *_: object) -> NoReturn:
        msg = f"A {kind} is a value, whose {name} is not set: {advice}."
        raise RecordError(msg, obj=type(self))

    return refuse
