# SPDX-License-Identifier: Apache-2.0
"""Random bugs: one operator, number or call of a function is changed, as a slip would change it.

`python -m tests.mutants --random 100 --seed 1 engine` tries 100 of them in the folder `engine`.
The tests that find the table's bugs in the same file are asked, those of the same function
first. Here a crash counts as found, because a test that crashes is a test that fails.
"""

import ast
import copy
import random
from collections.abc import Iterator, Sequence
from typing import Any

import attrs

from tests.mutants.change import change_function
from tests.mutants.hunt import hunt
from tests.mutants.mutant import Mutant
from tests.mutants.places import Place, all_places, find_place

_SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitOr: ast.BitAnd,
}
_TEXTS = {"msg", "advise"}
"""Names whose statements hold a message for people."""
_MOST_TESTS = 10
_SECONDS = 120


@attrs.frozen
class Slip:
    """A random bug.

    Attributes:
        place: the function.
        change: the change, as a row of the table has it.
    """

    place: Place
    change: str

    def as_mutant(self, case: str) -> Mutant:
        """Return the bug as a row of the table, with a test to ask."""
        name = f"{self.place.module.removeprefix('accelfn.')}:{self.place.name}"
        return Mutant(name, self.change, case, "", f"{name}: {self.change}")


def find_survivors(
    mutants: Sequence[Mutant], count: int, seed: int, folder: str
) -> Iterator[tuple[Slip, str]]:
    """Yield random bugs, each with the test that found it, or "" if no test did.

    Args:
        mutants: the rows of the table, whose tests are asked.
        count: how many bugs to try.
        seed: of the choice.
        folder: the folder of the package, or "" for all.
    """
    cases: dict[str, list[tuple[str, str]]] = {}
    for each in mutants:
        if not each.case.startswith("accelerator."):
            place = find_place(each.place)
            cases.setdefault(place.module, []).append((place.name, each.case))
    places = [p for p in all_places() if f"accelfn.{folder}" in p.module]
    places = [p for p in places if p.module in cases]
    choose = random.Random(seed)  # noqa: S311 - a choice of bugs, no secret
    tried = 0
    while tried < count:
        place = choose.choice(places)
        changes = list(possible_changes(place))
        if not changes:
            continue
        tried += 1
        slip = Slip(place, choose.choice(changes))
        yield slip, _find_test(slip, cases[place.module])


def possible_changes(place: Place) -> Iterator[str]:
    """Yield all changes of one operator, number, condition or call of a function."""
    for statement in ast.walk(place.node):
        if not isinstance(statement, ast.stmt) or _is_text(statement):
            continue
        head = _head(statement)
        if head is None:
            continue
        for new in _variants(head):
            change = f"{ast.unparse(head)} → {ast.unparse(new)}"
            try:
                change_function(place.node, change)
            except (SyntaxError, ValueError):  # twice in this function
                continue
            yield change


def _find_test(slip: Slip, cases: list[tuple[str, str]]) -> str:
    """Return the test that finds a bug, or ""."""
    owner = slip.place.name.rpartition(".")[0]
    near = sorted(
        cases,
        key=lambda case: (case[0] != slip.place.name, not case[0].startswith(owner)),
    )
    for case in list(dict.fromkeys(case for _, case in near))[:_MOST_TESTS]:
        if hunt(slip.as_mutant(case), seconds=_SECONDS).told:
            return case
    return ""


def _is_text(statement: ast.stmt) -> bool:
    """Whether a statement only makes a message, or raises it."""
    if isinstance(statement, ast.Raise):
        return True
    names = {each.id for each in ast.walk(statement) if isinstance(each, ast.Name)}
    is_simple = not hasattr(statement, "body")
    return is_simple and bool(names & _TEXTS)


def _head(statement: ast.stmt) -> ast.stmt | None:
    """Return a statement without its body; None for definitions and other blocks."""
    if isinstance(statement, ast.If | ast.While):
        return type(statement)(statement.test, [ast.Expr(ast.Constant(...))], [])
    return None if hasattr(statement, "body") else statement


def _variants(head: ast.stmt) -> Iterator[ast.stmt]:
    if isinstance(head, ast.Expr):
        yield ast.Pass()
    if isinstance(head, ast.If):
        yield ast.If(ast.UnaryOp(ast.Not(), head.test), head.body, [])
    for index, node in enumerate(ast.walk(head)):
        for attribute, value in _changes_of(node):
            new: Any = copy.deepcopy(head)
            setattr(list(ast.walk(new))[index], attribute, value)
            yield new


def _changes_of(node: ast.AST) -> Iterator[tuple[str, Any]]:
    """Yield attributes of a node with a new value for each."""
    if isinstance(node, ast.BinOp | ast.BoolOp | ast.AugAssign):
        swap = _SWAPS.get(type(node.op))
        if swap is not None:
            yield "op", swap()
    elif isinstance(node, ast.Compare):
        for index, operator in enumerate(node.ops):
            new = list(node.ops)
            new[index] = _SWAPS[type(operator)]()
            yield "ops", new
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield "value", not node.value
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        yield "value", node.value + 1
