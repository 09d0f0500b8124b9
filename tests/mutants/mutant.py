# SPDX-License-Identifier: Apache-2.0
"""A mutant: a function of accelfn with one bug, and the test that must find the bug.

To insert a bug, the function's `__code__` is replaced. So modules that have already imported the
function also have the bug. Afterwards the original `__code__` is restored.
"""

import ast
import builtins
import dis
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import Any

import attrs

from tests.mutants.cases import Case, find_case, find_module
from tests.mutants.change import Function, change_function
from tests.mutants.places import Place, find_place


@attrs.frozen
class Mutant:
    """A bug: a row of the table.

    Attributes:
        place: the qualified name of the function that has the bug; see `places`.
        change: the change of the function, as `old → new`; see `change`.
        case: pytest's id of the test that must fail; see `cases`.
        law: the number of the law that the test checks; "" if the test checks no law.
        says: a sentence about the wrong behavior; different for each row.
        examples: how many examples the test needed when all mutants last ran; "" if unknown.
    """

    place: str
    change: str
    case: str
    law: str
    says: str
    examples: str = ""

    @property
    def module(self) -> str:
        """The name of the test's module; the module is not imported."""
        return self._looked_up(find_module, self.case)

    @property
    def test(self) -> Callable[..., None]:
        """The test that must fail."""
        return self._found_case.test

    @property
    def args(self) -> dict[str, Any]:
        """The parametrized arguments of the test, without fixtures."""
        return self._found_case.args

    @property
    def function(self) -> FunctionType:
        """The function that has the bug."""
        return self._found_place.function

    def code(self) -> CodeType:
        """Return the function's code with the bug in it.

        Raises:
            ValueError: the code to change does not occur exactly once in the function, or the new
                code has a name that does not exist.
        """
        place = self._found_place
        try:
            changed = change_function(place.node, self.change)
        except (ValueError, SyntaxError) as error:
            msg = f"mutant {self.says!r}: {error}. Update its row in table.tsv."
            raise ValueError(msg) from error
        code = compile_function(place.function, changed)
        known = place.function.__globals__.keys() | vars(builtins).keys()
        for name in sorted(_global_names(code) - known):
            msg = f"mutant {self.says!r}: no name {name}. Update its row in table.tsv."
            raise ValueError(msg)
        return code

    @property
    def _found_place(self) -> Place:
        return self._looked_up(find_place, self.place)

    @property
    def _found_case(self) -> Case:
        return self._looked_up(find_case, self.case)

    def _looked_up(self, find: Callable[[str], Any], text: str) -> Any:
        try:
            return find(text)
        except LookupError as error:
            msg = f"mutant {self.says!r}: {error.args[0]}"
            raise LookupError(msg) from error


def compile_function(function: FunctionType, changed: Function) -> CodeType:
    """Compile a changed syntax tree of a function; return the function's code object."""
    tree = ast.fix_missing_locations(ast.Module([changed], []))
    whole = compile(tree, inspect.getsourcefile(function) or "", "exec")
    return next(
        each
        for each in whole.co_consts
        if isinstance(each, CodeType) and each.co_name == changed.name
    )


def _global_names(code: CodeType) -> set[str]:
    """Return the global names that a function and its inner functions read."""
    inner = [each for each in code.co_consts if isinstance(each, CodeType)]
    reads = (
        each for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL"
    )
    return {each.argval for each in reads}.union(*map(_global_names, inner))


@contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    """Insert the bug inside a `with` block."""
    function, bug = mutant.function, mutant.code()
    own, function.__code__ = function.__code__, bug
    try:
        yield
    finally:
        function.__code__ = own
