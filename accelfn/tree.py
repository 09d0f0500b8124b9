# SPDX-License-Identifier: Apache-2.0
"""Containers of tensors: what a batch, a slot or a prediction may be.

A tree is a tensor, or a dict, list, tuple, namedtuple, dataclass or attrs record of trees; any
other object is a leaf that is passed through untouched.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any, cast

import attrs
import torch

from accelfn.errors import BatchError


def tree_map(fn: Callable[[Any], Any], tree: Any) -> Any:  # noqa: PLR0911 - one a kind
    """Return the same containers with `fn(leaf)` in place of every leaf."""
    if isinstance(tree, torch.Tensor):
        return fn(tree)
    if isinstance(tree, Mapping):
        items = cast("Mapping[Any, Any]", tree)
        mapped = {key: tree_map(fn, value) for key, value in items.items()}
        return mapped if type(tree) is dict else cast("Any", type(tree))(mapped)
    if isinstance(tree, tuple):
        parts = [tree_map(fn, value) for value in cast("tuple[Any, ...]", tree)]
        if hasattr(tree, "_fields"):  # the one mark by which namedtuples are known
            return cast("Any", type(tree))(*parts)
        return tuple(parts)
    if isinstance(tree, list):
        return [tree_map(fn, value) for value in cast("list[Any]", tree)]
    if _fields(type(tree)):
        return _map_record(fn, tree)
    return fn(tree)


def _map_record(fn: Callable[[Any], Any], record: Any) -> Any:
    changes = {
        argument: tree_map(fn, getattr(record, name))
        for name, argument in _fields(type(record)).items()
    }
    replace = attrs.evolve if attrs.has(type(record)) else dataclasses.replace
    return cast("Any", replace)(record, **changes)


@cache
def _fields(kind: type) -> Mapping[str, str]:
    """Return the fields of a dataclass or attrs record, with their names as arguments.

    accelfn's own records, a state among them, are leaves.
    """
    if kind.__module__.partition(".")[0] == __package__:
        return {}
    if attrs.has(kind) and not hasattr(kind, "__attrs_init__"):
        return {e.name: e.alias or e.name for e in attrs.fields(kind) if e.init}
    if dataclasses.is_dataclass(kind):
        return {each.name: each.name for each in dataclasses.fields(kind) if each.init}
    return {}


def tree_map_all(fn: Callable[..., Any], first: Any, *others: Any) -> Any:
    """Return the first tree with `fn(its leaf, theirs...)` in place of every leaf."""
    leaves = zip(*(tree_leaves(each) for each in (first, *others)), strict=True)
    return tree_map(lambda _: fn(*next(leaves)), first)


def tree_leaves(tree: Any) -> list[Any]:
    """Return the leaves in order: dicts by insertion, sequences by position."""
    leaves: list[Any] = []
    _gather(tree, leaves)
    return leaves


def _gather(tree: Any, leaves: list[Any]) -> None:
    # tensors first, and no generators: a step walks its batch
    if isinstance(tree, torch.Tensor):
        leaves.append(tree)
    elif isinstance(tree, (list, tuple)):
        for value in cast("list[Any]", tree):
            _gather(value, leaves)
    elif isinstance(tree, Mapping):
        for value in cast("Mapping[Any, Any]", tree).values():
            _gather(value, leaves)
    elif names := _fields(type(tree)):
        for name in names:
            _gather(getattr(tree, name), leaves)
    else:
        leaves.append(tree)


def outline(tree: Any, show: Callable[[Any], str]) -> str:
    """Return the containers as text, with `show(leaf)` in place of every leaf."""
    if not isinstance(tree, torch.Tensor):
        if isinstance(tree, Mapping):
            items = cast("Mapping[Any, Any]", tree).items()
            inside = ", ".join(f"{key!r}: {outline(v, show)}" for key, v in items)
            return f"{{{inside}}}"
        if isinstance(tree, (list, tuple)) and not hasattr(tree, "_fields"):
            parts = ", ".join(outline(v, show) for v in cast("list[Any]", tree))
            return f"[{parts}]" if isinstance(tree, list) else f"({parts})"
        names: Iterable[str] = getattr(tree, "_fields", None) or _fields(type(tree))
        if names:
            each = ", ".join(f"{n}={outline(getattr(tree, n), show)}" for n in names)
            return f"{type(tree).__name__}({each})"
    return show(tree)


def tensor_leaves(tree: Any) -> list[torch.Tensor]:
    """Return the tensors among the leaves, in order."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def clone(tree: Any) -> Any:
    """Return the same tree with every tensor copied; shared tensors stay shared."""
    copies: dict[int, torch.Tensor] = {}

    def copy_once(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) not in copies:
            copies[id(leaf)] = leaf.detach().clone()
        return copies[id(leaf)]

    return tree_map(copy_once, tree)


def to_device(tree: Any, device: torch.device) -> Any:
    """Return the tree with its tensors on `device`; on it already, it is returned as is."""
    tensors = tensor_leaves(tree)
    if all(tensor.device == device for tensor in tensors):
        return tree

    def move(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.to(device, non_blocking=leaf.is_pinned())
        return leaf

    return tree_map(move, tree)


def num_rows(tree: Any) -> int:
    """Return how many samples a plain batch holds: the common size of dim 0.

    Raises:
        BatchError: there is no tensor with a dim 0, or they differ in it.
    """
    sizes = {leaf.shape[0] for leaf in tensor_leaves(tree) if leaf.ndim > 0}
    if len(sizes) == 1:
        return sizes.pop()
    found = f"dim 0 of its tensors is {sorted(sizes)}" if sizes else "it has no tensor"
    msg = (
        f"Cannot tell how many samples this batch holds: {found}. "
        "Return af.Loss(total, weight) from the loss function, or step over af.batches."
    )
    raise BatchError(msg)
