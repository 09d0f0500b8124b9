# SPDX-License-Identifier: Apache-2.0
"""A mutant: one function of accelfn with one bug in it, and the test that must find it.

A bug is written as a change of the function's source. It is planted by giving the function
the changed code, so that whoever imported it has the bug, and taken out by giving it its
own code back.
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import Any

import attrs

Place = FunctionType | property

_LAW = re.compile(r"(L\d+): ")


@attrs.frozen
class Mutant:
    """A bug.

    Attributes:
        bug: what is wrong, in a sentence; of a law, after its number and a colon.
        test: it must fail; of a law, the law's.
        place: the function, or property, that has the bug.
        change: a part of its source that is there once, an arrow, and what stands there
            instead; the arrow has a space, or a line's end, before and after it.
        args: of a test that pytest parametrizes.
    """

    bug: str
    test: Callable[..., None]
    place: Place
    change: str
    args: Mapping[str, Any] = attrs.field(factory=dict, kw_only=True)

    @property
    def says(self) -> str:
        """What is wrong, in a sentence, which no other bug has."""
        return _LAW.sub("", self.bug)

    @property
    def law(self) -> str | None:
        """Its number in the catalogue of laws; None where the test is of no law."""
        number = _LAW.match(self.bug)
        return number and number[1]

    @property
    def function(self) -> FunctionType:
        """The function that has the bug."""
        place = self.place.fget if isinstance(self.place, property) else self.place
        return inspect.unwrap(place)

    @property
    def where(self) -> str:
        """What the function is called."""
        return f"{self.function.__module__}.{self.function.__qualname__}"

    def code(self) -> CodeType:
        """Return the function's code with the bug in it.

        Raises:
            ValueError: the source has not the part that was to be changed, or has it twice.
        """
        source = textwrap.dedent(inspect.getsource(self.function))
        old, new = re.split(r"\s→\s", self.change.removesuffix("\n"))
        if source.count(old) != 1:
            msg = (
                f"mutant {self.says!r}: {self.where} has {source.count(old)} times"
                f" {old!r}; expected once. The function has changed: plant the bug anew."
            )
            raise ValueError(msg)
        tree = ast.parse(source.replace(old, new))
        tree.body[0].decorator_list = []
        whole = compile(tree, inspect.getsourcefile(self.function) or "", "exec")
        return next(
            each
            for each in whole.co_consts
            if isinstance(each, CodeType) and each.co_name == self.function.__name__
        )


@contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    """Let accelfn have the bug inside a `with` block."""
    function, bug = mutant.function, mutant.code()
    own, function.__code__ = function.__code__, bug
    try:
        yield
    finally:
        function.__code__ = own
