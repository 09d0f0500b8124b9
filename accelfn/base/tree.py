# SPDX-License-Identifier: Apache-2.0
"""Containers of tensors: what a batch, a slot or a prediction may be.

A tree is a tensor, or a dict, list, tuple, namedtuple, dataclass or attrs record of trees, or
one that is pending; any other object is a leaf that is passed through untouched.
"""

import copy
import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any, cast

import attrs
import torch

from accelfn.base.pending import Pending
from accelfn.base.read_only import ReadOnly
from accelfn.base.shards import copied, is_shard
from accelfn.errors import ArgumentError, BatchError


def tree_map(fn: Callable[[Any], Any], tree: Any) -> Any:
    """Return the same containers with `fn(leaf)` in place of every leaf.

    A record is copied and all its fields are set: nothing of its own runs, and what is no
    field of it stays.

    Raises:
        ArgumentError: a mapping is of a kind that is not made from a dict, or a record cannot
            be copied.
    """
    return _map(fn, tree, by_key=False)


def _map(
    fn: Callable[[Any], Any],
    tree: Any,
    *,
    by_key: bool,
    whole: Callable[[Any], bool] | None = None,
) -> Any:
    """Map a tree; what is `whole` is a leaf, whatever is in it."""
    if isinstance(tree, torch.Tensor) or (whole is not None and whole(tree)):
        return fn(tree)

    def inner(value: Any) -> Any:
        return _map(fn, value, by_key=by_key, whole=whole)

    if isinstance(tree, Mapping):
        items = cast("Mapping[Any, Any]", tree)
        order = _by_key(items) if by_key else items
        mapped = {key: inner(items[key]) for key in order}
        return _like(items, {key: mapped[key] for key in items} if by_key else mapped)
    if isinstance(tree, (tuple, list)):
        parts = [inner(value) for value in cast("list[Any]", tree)]
        if hasattr(tree, "_fields"):  # the one mark by which namedtuples are known
            return cast("Any", type(tree))(*parts)
        return parts if isinstance(tree, list) else tuple(parts)
    if isinstance(tree, Pending):
        return Pending.of(inner(tree.wait()))
    return _map_record(inner, tree) if _fields(type(tree)) else fn(tree)


def _like(items: Mapping[Any, Any], mapped: dict[Any, Any]) -> Any:
    """Return a mapping of the kind of another."""
    if type(items) is dict or isinstance(items, ReadOnly):  # which shows a dict
        return mapped
    kind = cast("Any", type(items))
    try:
        if isinstance(items, defaultdict):
            return kind(cast("Any", items).default_factory, mapped)
        return kind(mapped)
    except TypeError as error:
        msg = (
            f"A {kind.__name__} stands in a batch, a slot or what ranks exchange, and"
            f" {kind.__name__}(a dict) raises TypeError: {error}. Give a dict."
        )
        raise ArgumentError(msg) from error


def _map_record(inner: Callable[[Any], Any], record: Any) -> Any:
    try:
        mapped = copy.copy(record)
    except (AttributeError, TypeError) as error:
        msg = (
            f"A {type(record).__name__} stands in a batch, a slot or what ranks exchange, and"
            f" copy.copy of it raises {type(error).__name__}: {error}. Give its parts in a"
            " dict."
        )
        raise ArgumentError(msg) from error
    for name, value in _set_fields(record):
        object.__setattr__(mapped, name, inner(value))  # frozen ones too
    return mapped


def _set_fields(record: Any) -> Iterator[tuple[str, Any]]:
    """Yield a record's fields; one that its class declares and never sets is left out."""
    for name in _fields(type(record)):
        if hasattr(record, name):
            yield name, getattr(record, name)


@cache
def _fields(kind: type) -> tuple[str, ...]:
    """Return the fields of a dataclass or attrs record, those too that are no arguments.

    accelfn's own records, a state among them, are leaves.
    """
    if kind.__module__.partition(".")[0] == __name__.partition(".")[0]:
        return ()
    if attrs.has(kind):
        return tuple(each.name for each in attrs.fields(kind))
    if dataclasses.is_dataclass(kind):
        return tuple(each.name for each in dataclasses.fields(kind))
    return ()


def tree_map_all(fn: Callable[..., Any], first: Any, *others: Any) -> Any:
    """Return the first tree with `fn(its leaf, theirs...)` in place of every leaf."""
    leaves = zip(*(tree_leaves(each) for each in (first, *others)), strict=True)
    return tree_map(lambda _: fn(*next(leaves)), first)


def tree_leaves(tree: Any) -> list[Any]:
    """Return the leaves in order: dicts by insertion, sequences by position."""
    leaves: list[Any] = []
    _gather(tree, leaves, by_key=False)
    return leaves


def _gather(tree: Any, leaves: list[Any], *, by_key: bool) -> None:
    # tensors first, and no generators: a step walks its batch
    if isinstance(tree, torch.Tensor):
        leaves.append(tree)
    elif isinstance(tree, (list, tuple)):
        for value in cast("list[Any]", tree):
            _gather(value, leaves, by_key=by_key)
    elif isinstance(tree, Mapping):
        items = cast("Mapping[Any, Any]", tree)
        for key in _by_key(items) if by_key else items:
            _gather(items[key], leaves, by_key=by_key)
    elif isinstance(tree, Pending):
        _gather(tree.wait(), leaves, by_key=by_key)
    elif _fields(type(tree)):
        for _, value in _set_fields(tree):
            _gather(value, leaves, by_key=by_key)
    else:
        leaves.append(tree)


def leaves_by_key(tree: Any) -> list[Any]:
    """Return the leaves in an order that does not depend on how dicts were filled.

    Dicts whose keys are all strings go by key, others by insertion: ranks may have put the
    same entries in in any order.
    """
    leaves: list[Any] = []
    _gather(tree, leaves, by_key=True)
    return leaves


def with_leaves(tree: Any, leaves: Iterable[Any]) -> Any:
    """Return the same containers with other leaves, given in the order of `leaves_by_key`."""
    rest = iter(leaves)
    return _map(lambda _: next(rest), tree, by_key=True)


def _by_key(items: Mapping[Any, Any]) -> Iterable[Any]:
    return sorted(items) if all(isinstance(key, str) for key in items) else items


def outline(tree: Any, show: Callable[[Any], str]) -> str:
    """Return the containers as text, with `show(leaf)` in place of every leaf; dicts by key."""
    if not isinstance(tree, torch.Tensor):
        if isinstance(tree, Mapping):
            items = cast("Mapping[Any, Any]", tree)
            inside = ", ".join(
                f"{key!r}: {outline(items[key], show)}" for key in _by_key(items)
            )
            return f"{{{inside}}}"
        if isinstance(tree, (list, tuple)) and not hasattr(tree, "_fields"):
            parts = ", ".join(outline(v, show) for v in cast("list[Any]", tree))
            return f"[{parts}]" if isinstance(tree, list) else f"({parts})"
        if isinstance(tree, Pending):
            return f"Pending({outline(tree.wait(), show)})"
        inner: Iterable[tuple[str, Any]] = _set_fields(tree)
        if isinstance(tree, tuple):
            named = cast("Any", tree)
            inner = zip(named._fields, named, strict=True)
        elif not _fields(type(tree)):
            return show(tree)
        each = ", ".join(f"{name}={outline(value, show)}" for name, value in inner)
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
            shared = is_shard(leaf)
            copies[id(leaf)] = copied(leaf) if shared else leaf.detach().clone()
        return copies[id(leaf)]

    return tree_map(copy_once, tree)


def to_device(tree: Any, device: torch.device, *, opaque: bool = True) -> Any:
    """Return the tree with its tensors on `device`; on it already, it is returned as is.

    What knows how to move itself does so, by its own `to(device)`: packed sequences, batches
    of tokenizers, records and objects of the user's. `opaque=False` leaves out those of
    which nobody can tell what tensors are in them.
    """
    leaves = tree_leaves(tree)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    moves = opaque and any(
        _moves_itself(leaf) for leaf in leaves if not isinstance(leaf, torch.Tensor)
    )
    if not moves and all(tensor.device == device for tensor in tensors):
        return tree

    def move(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.to(device, non_blocking=leaf.is_pinned())
        if _moves_itself(leaf) and (opaque or _is_container(leaf)):
            return leaf.to(device)
        return leaf

    return _map(move, tree, by_key=False, whole=_moves_itself)


def _moves_itself(tree: Any) -> bool:
    """Whether it is an object, or a container, with a way to a device of its own."""
    return callable(getattr(type(tree), "to", None))


def _is_container(tree: Any) -> bool:
    """Whether its tensors are among the leaves of a tree that it stands in."""
    return isinstance(tree, (Mapping, tuple, list)) or bool(_fields(type(tree)))


def rows(tree: Any, start: int, stop: int) -> Any:
    """Return the tree with these rows of its tensors; what has no rows stays."""

    def cut(leaf: Any) -> Any:
        has_rows = isinstance(leaf, torch.Tensor) and leaf.ndim
        return leaf[start:stop] if has_rows else leaf

    return tree_map(cut, tree)


def num_rows(tree: Any) -> int:
    """Return how many samples a plain batch holds: the common size of dim 0.

    Raises:
        BatchError: there is no tensor with a dim 0, or they differ in it.
    """
    sizes = {leaf.size(0) for leaf in tensor_leaves(tree) if leaf.ndim > 0}
    if len(sizes) == 1:
        return sizes.pop()
    found = f"dim 0 of its tensors is {sorted(sizes)}" if sizes else "it has no tensor"
    msg = (
        f"Cannot tell how many samples this batch holds: {found}. "
        "Return af.Loss(total, weight) from the loss function, or step over af.batches."
    )
    raise BatchError(msg)
