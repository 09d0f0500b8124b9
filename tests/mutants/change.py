# SPDX-License-Identifier: Apache-2.0
"""Change the syntax tree of a function, to insert a bug: `old → new`.

`old` and `new` are expressions or statements. Layout, quotes and parentheses do not matter.
Decorators and docstrings of the function are ignored. `old` must occur exactly once.

`⏎` is the end of a line. `if ready: ...` as `old` matches only the condition: the body and the
`else` do not change. `...` in `new` is that body, so `if ready: ... → ...` removes the condition.
`pass` as `new` deletes the statements. `seed=1 → seed=2` also changes a keyword argument of a
call, and `seed=1 → pass` deletes the argument.
"""

import ast
import re
from collections.abc import Iterator, Sequence
from typing import Any

LINE_END = "⏎"
Function = ast.FunctionDef | ast.AsyncFunctionDef
_BLOCKS = ("body", "orelse", "finalbody")
_CONTEXT = re.compile(r", ctx=\w+\(\)")


def change_function(function: Function, change: str) -> Function:
    """Apply a change to the syntax tree of a function, in place; return the tree.

    Raises:
        ValueError: `old` does not occur in the function exactly once.
    """
    whole = ast.Module([plain(function)], [])
    old, new = [_parse(part) for part in re.split(r"\s→\s", change)]
    if _is_expression(old) and _is_expression(new):
        slots = _expression_slots(whole, old[0].value)
    else:
        slots = _statement_slots(whole, old)
    found = list(slots)
    if len(found) != 1:
        part = re.split(r"\s→\s", change)[0]
        msg = f"{function.name} contains `{part}` {len(found)} times, expected once"
        raise ValueError(msg)
    parent, field, index = found[0]
    if _is_expression(old) and _is_expression(new):
        _replace_expression(parent, field, index, new[0].value)
    elif field == "keywords":
        parent.keywords[index : index + 1] = _as_keywords(new)
    else:
        _replace_statements(getattr(parent, field), index, len(old), new)
    return drop_passes(whole).body[0]


def plain(function: Function) -> Function:
    """Remove decorators and docstrings from a function's tree, in place; return the tree."""
    function.decorator_list = []
    for node in ast.walk(function):
        if isinstance(node, Function | ast.ClassDef) and _has_docstring(node):
            node.body = node.body[1:] or [ast.Pass()]
    return function


def drop_passes(tree: Any) -> Any:
    """Delete each `pass` that is next to other statements, in place; return the tree."""
    for body in _statement_lists(tree):
        if len(body) > 1:
            kept = [each for each in body if not isinstance(each, ast.Pass)]
            body[:] = kept or [ast.Pass()]
    return tree


def dump(node: ast.AST) -> str:
    """Return a text that is the same for equal trees, even as target of an assignment."""
    return _CONTEXT.sub("", ast.dump(node))


def is_head(node: ast.AST) -> bool:
    """Return whether a statement has only `...` as its body, such as `if ready: ...`."""
    body = getattr(node, "body", None)
    return isinstance(body, list) and len(body) == 1 and _is_ellipsis(body[0])


def _parse(text: str) -> list[Any]:
    return ast.parse(text.strip().replace(LINE_END, "\n")).body


def _is_expression(statements: Sequence[Any]) -> bool:
    return len(statements) == 1 and isinstance(statements[0], ast.Expr)


def _is_ellipsis(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and dump(node.value) == "Constant(value=Ellipsis)"


def _has_docstring(node: Any) -> bool:
    first = node.body[0]
    return (
        isinstance(first, ast.Expr)
        and isinstance(first.value, ast.Constant)
        and isinstance(first.value.value, str)
    )


def _statement_lists(tree: ast.AST) -> Iterator[list[Any]]:
    for node in ast.walk(tree):
        for field in _BLOCKS:
            body = getattr(node, field, None)
            if isinstance(body, list) and body:
                yield body


def _expression_slots(
    tree: ast.AST, old: ast.expr
) -> Iterator[tuple[ast.AST, str, int]]:
    """Yield where expressions equal to `old` are: node, field, and index (-1 if not a list)."""
    kind, text = type(old), dump(old)
    for node in ast.walk(tree):
        for field, value in ast.iter_fields(node):
            listed = isinstance(value, list)
            for index, each in enumerate(value if listed else [value]):
                if type(each) is kind and dump(each) == text:
                    yield node, field, index if listed else -1


def _statement_slots(
    tree: ast.AST, old: Sequence[ast.stmt]
) -> Iterator[tuple[ast.AST, str, int]]:
    """Yield where statements equal to `old` are: node, field and first index."""
    named = _as_keywords(old)
    for node in ast.walk(tree):
        if named and isinstance(node, ast.Call):
            for index, each in enumerate(node.keywords):
                if dump(each) == dump(named[0]):
                    yield node, "keywords", index
        for field in _BLOCKS:
            body = getattr(node, field, None)
            for start in range(len(body) if isinstance(body, list) else 0):
                run = body[start : start + len(old)]
                if len(run) == len(old) and all(map(_matches, run, old)):
                    yield node, field, start


def _as_keywords(statements: Sequence[Any]) -> list[ast.keyword]:
    """Convert assignments to keyword arguments; return [] for other statements."""
    named = [
        ast.keyword(each.targets[0].id, each.value)
        for each in statements
        if isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Name)
    ]
    return named if len(named) == len(statements) else []


def _matches(node: ast.AST, pattern: ast.AST) -> bool:
    if type(node) is not type(pattern):
        return False
    if not is_head(pattern):
        return dump(node) == dump(pattern)
    return all(
        _same(value, getattr(pattern, field))
        for field, value in ast.iter_fields(node)
        if field not in _BLOCKS
    )


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return dump(one) == dump(other) if _are_nodes(one, other) else one == other


def _are_nodes(*values: Any) -> bool:
    return all(isinstance(each, ast.AST) for each in values)


def _replace_expression(parent: Any, field: str, index: int, new: ast.expr) -> None:
    old = getattr(parent, field) if index < 0 else getattr(parent, field)[index]
    _set_context(new, getattr(old, "ctx", None))
    if index < 0:
        setattr(parent, field, new)
    else:
        getattr(parent, field)[index] = new


def _set_context(node: Any, context: ast.expr_context | None) -> None:
    """Set the context of an expression (load or store) to that of the replaced one."""
    if context is not None and hasattr(node, "ctx"):
        node.ctx = context
        inner = [node.value] if isinstance(node, ast.Starred) else []
        for each in [*inner, *getattr(node, "elts", [])]:
            _set_context(each, context)


def _replace_statements(
    body: list[Any], start: int, count: int, new: list[ast.stmt]
) -> None:
    old = body[start]
    if count == 1 and hasattr(old, "body"):
        for each in new:
            if is_head(each) and hasattr(each, "orelse"):
                each.orelse = each.orelse or getattr(old, "orelse", [])
        for block in [new, *_statement_lists(ast.Module(new, []))]:
            for index, each in enumerate(block):
                if _is_ellipsis(each):
                    block[index : index + 1] = old.body
                    break
    body[start : start + count] = new
