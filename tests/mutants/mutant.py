# SPDX-License-Identifier: Apache-2.0
"""A mutant: one function of accelfn with one bug in it, and the test that must find it.

A bug is written as a change of the function's source. It is planted by giving the function
the changed code, so that whoever imported it has the bug, and taken out by giving it its
own code back.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import Any

import attrs

Place = FunctionType | property


@attrs.frozen(kw_only=True)
class Mutant:
    """A bug.

    Attributes:
        name: a few words.
        says: what is wrong, in a sentence.
        law: its number in the catalogue of laws; None where the test is of no law.
        test: it must fail; of a law, the law's.
        args: of a test that pytest parametrizes.
        place: the function, or property, that has the bug.
        old: a part of its source that is there once.
        new: what stands there instead.
    """

    name: str
    says: str
    law: str | None = None
    test: Callable[..., None]
    args: Mapping[str, Any] = attrs.field(factory=dict)
    place: Place
    old: str
    new: str

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
        if source.count(self.old) != 1:
            msg = (
                f"mutant {self.name!r}: {self.where} has {source.count(self.old)} times"
                f" {self.old!r}; expected once. The function has changed: plant the bug anew."
            )
            raise ValueError(msg)
        tree = ast.parse(source.replace(self.old, self.new))
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
