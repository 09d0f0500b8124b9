# SPDX-License-Identifier: Apache-2.0
"""Random bugs: changes of one operator, number, condition or call of a function."""

import ast
import copy
from collections.abc import Iterator
from typing import Any

from tests.mutants.change import change_function
from tests.mutants.places import Place

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
"""Statements with these names only create messages, and are not changed."""


def possible_changes(place: Place) -> Iterator[str]:
    """Yield every possible change of one operator, number, condition or call."""
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
            except (SyntaxError, ValueError):  # the statement occurs twice
                continue
            yield change


def _is_text(statement: ast.stmt) -> bool:
    """Return whether a statement only creates or raises an error message."""
    if isinstance(statement, ast.Raise):
        return True
    names = {each.id for each in ast.walk(statement) if isinstance(each, ast.Name)}
    is_simple = not hasattr(statement, "body")
    return is_simple and bool(names & _TEXTS)


def _head(statement: ast.stmt) -> ast.stmt | None:
    """Return a statement with `...` as its body; None for definitions and other blocks."""
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
    """Yield each attribute of a node that can change, with its new value."""
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
