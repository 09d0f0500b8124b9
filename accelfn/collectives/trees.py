# SPDX-License-Identifier: Apache-2.0
"""Collectives on trees of tensors: dicts, lists, tuples, dataclasses and attrs records of them.

Nothing given is changed, and no result shares memory with it. A world of 1 gives the shapes that
a world of N does.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from accelfn import tree
from accelfn.collectives.agreed import agreed
from accelfn.collectives.naming import naming
from accelfn.collectives.packed import (
    all_gather,
    all_gather_rows,
    broadcast_,
    cut,
    pack,
)
from accelfn.errors import ArgumentError
from accelfn.world import World

T = TypeVar("T")

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}
_WIDER = {
    torch.bool: torch.int64,
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
}
"""What Gloo reduces in place of a dtype; sums and products wrap around as its own would."""
_REAL = frozenset(
    {
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.uint8, torch.int8, torch.int32, torch.int64),
        *_WIDER,
    }
)
_COMPLEX = frozenset({torch.complex64, torch.complex128})


def gather(values: T, world: World, *, grad: bool = False, label: str = "gather") -> T:
    """Return every rank's tensors, joined along dim 0 in rank order, on all ranks.

    Args:
        values: a tree of tensors, of the same shapes and dtypes on all ranks. A scalar is a
            row: it becomes a vector with one element a rank.
        world: whose ranks take part.
        grad: whether the result is differentiated: a rank's tensor then gets the sum of the
            gradients that all ranks have for its part, as a contrastive loss needs.
        label: what the ranks are doing, for errors and logs.

    Law: with equal parts, splitting the result gives them back.

    Cost: one all-gather a dtype; with `grad`, one a tensor, and an all-reduce in the backward
    pass.

    Raises:
        ArgumentError: a leaf is no tensor; see `gather_objects`.
    """
    if grad:
        tensors_of(values, label)

        def differentiably(leaf: torch.Tensor) -> Any:
            return cast("Any", _Gather).apply(_row(leaf), world, label)

        return tree.tree_map(differentiably, values)
    leaves = tensors_of(values, label)
    ready = agreed(world, "gather", label, values)
    return _by_dtype(values, leaves, lambda same: _gathered(same, ready, label))


def gather_ragged(values: T, world: World, *, label: str = "gather_ragged") -> T:
    """Return every rank's rows, joined along dim 0; ranks may have any numbers of them.

    Args:
        values: a tree of tensors; all but dim 0 is the same on all ranks.
        world: whose ranks take part.
        label: what the ranks are doing.

    Law: it is `gather` of what was padded, without the padding.

    Cost: one gather of the lengths, and one a tensor, of as many rows as the longest has.
    """
    leaves = [_row(leaf) for leaf in tensors_of(values, label)]
    world = agreed(world, "gather_ragged", label, values, free=0)
    if not leaves:
        return values
    mine = torch.tensor([len(leaf) for leaf in leaves], device=world.device)
    lengths = torch.stack(all_gather(mine, world, label=label)).tolist()
    found = iter(
        [
            all_gather_rows(
                leaf.detach(), [row[i] for row in lengths], world, label=label
            ).clone()
            for i, leaf in enumerate(leaves)
        ]
    )
    return tree.tree_map(lambda _: next(found), values)


def reduce(values: T, world: World, op: str = "sum", *, label: str = "reduce") -> T:
    """Return tensors combined over all ranks, element by element, on all ranks.

    Args:
        values: a tree of tensors, of the same shapes and dtypes on all ranks.
        world: whose ranks take part.
        op: "sum", "mean", "min", "max" or "product". A mean of integers is a float, and
            booleans are counted by a sum.
        label: what the ranks are doing.

    Cost: one all-reduce a dtype.

    Raises:
        ArgumentError: another word, a leaf that is no tensor, or complex numbers that are to
            be ordered or multiplied.
    """
    if op not in _OPS:
        msg = f"af.reduce(op={op!r}): expected one of {', '.join(map(repr, _OPS))}."
        raise ArgumentError(msg)
    leaves = tensors_of(values, label)
    for dtype in {leaf.dtype for leaf in leaves}:
        _check_reducible(dtype, op)
    ready = agreed(world, "reduce", label, values, op=op)
    return _by_dtype(values, leaves, lambda same: _reduced(same, ready, op, label))


def broadcast(values: T, world: World, *, root: int = 0, label: str = "broadcast") -> T:
    """Return the tensors that rank `root` has, on all ranks.

    Args:
        values: a tree of tensors, of the same shapes and dtypes on all ranks.
        world: whose ranks take part.
        root: the rank whose values count.
        label: what the ranks are doing.

    Law: once more changes nothing.

    Cost: one broadcast a dtype.
    """
    check_root("broadcast", root, world)
    leaves = tensors_of(values, label)
    ready = agreed(world, "broadcast", label, values, root=root)

    def given(same: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        flat = pack(same)
        broadcast_([flat], ready, label=label, root=root)
        return cut(flat, same)

    return _by_dtype(values, leaves, given)


def pad_across(
    values: T,
    world: World,
    *,
    dim: int = 0,
    value: float = 0,
    first: bool = False,
    label: str = "pad_across",
) -> T:
    """Return tensors as long in one dimension as the longest that any rank has.

    Args:
        values: a tree of tensors; all but one dimension is the same on all ranks.
        world: whose ranks take part.
        dim: which dimension; a negative one counts from the last.
        value: what fills it up.
        first: whether filling comes before the values.
        label: what the ranks are doing.

    Cost: one gather of the lengths.

    Raises:
        ArgumentError: a tensor has no such dimension.
    """
    leaves = tensors_of(values, label)
    for leaf in leaves:
        if not -leaf.ndim <= dim < leaf.ndim:
            msg = (
                f"af.pad_across(dim={dim}): a tensor has the shape {tuple(leaf.shape)}."
            )
            raise ArgumentError(msg)
    world = agreed(world, "pad_across", label, values, free=dim)
    if not leaves:
        return values
    mine = torch.tensor([leaf.shape[dim] for leaf in leaves], device=world.device)
    longest = torch.stack(all_gather(mine, world, label=label)).amax(0).tolist()
    sizes = iter(longest)

    def padded(leaf: torch.Tensor) -> torch.Tensor:
        missing = list(leaf.shape)
        missing[dim] = next(sizes) - leaf.shape[dim]
        filling = leaf.new_full(missing, value)
        return torch.cat([filling, leaf] if first else [leaf, filling], dim)

    return tree.tree_map(padded, values)


def any_rank(flag: object, world: World, *, label: str = "any_rank") -> bool:
    """Return whether the flag is true on any rank, the same on all."""
    value = torch.tensor(int(bool(flag)), device=world.device)
    return bool(reduce(value, world, "max", label=label))


def all_ranks(flag: object, world: World, *, label: str = "all_ranks") -> bool:
    """Return whether the flag is true on every rank, the same on all."""
    return not any_rank(not flag, world, label=label)


def check_root(name: str, root: int, world: World) -> None:
    """Raise unless there is such a rank.

    Raises:
        ArgumentError: there is none.
    """
    if (
        not isinstance(root, int)
        or isinstance(root, bool)
        or not 0 <= root < world.size
    ):
        msg = f"af.{name}(root={root!r}): expected a rank from 0 to {world.size - 1}."
        raise ArgumentError(msg)


def tensors_of(values: Any, label: str) -> list[torch.Tensor]:
    """Return the leaves of a tree.

    Raises:
        ArgumentError: one is no tensor.
    """
    leaves = tree.tree_leaves(values)
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            msg = (
                f"{label}: a leaf is a {type(leaf).__name__}; expected tensors. Objects"
                " travel by af.gather_objects and af.broadcast_object."
            )
            raise ArgumentError(msg)
    return leaves


class _Gather(torch.autograd.Function):
    """An all-gather whose backward pass sums, over the ranks, the gradients of a part."""

    @staticmethod
    def forward(ctx: Any, mine: torch.Tensor, world: World, label: str) -> torch.Tensor:
        ctx.rows, ctx.world, ctx.label = len(mine), world, label
        return torch.cat(all_gather(mine, world, label=label))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        world, (gradient,) = ctx.world, grad_outputs
        (total,) = _reduced([gradient], world, "sum", f"{ctx.label}: gradient")
        return total[world.rank * ctx.rows :][: ctx.rows], None, None


def _by_dtype(
    values: Any,
    leaves: Sequence[torch.Tensor],
    how: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]],
) -> Any:
    """Return the tree with what `how` gives for its leaves, those of a dtype at a time."""
    dtypes = dict.fromkeys([leaf.dtype for leaf in leaves])
    if len(dtypes) == 1:
        results = iter(how(leaves))
        return tree.tree_map(lambda _: next(results), values)
    found: dict[int, torch.Tensor] = {}
    for dtype in dtypes:
        places = [i for i, leaf in enumerate(leaves) if leaf.dtype == dtype]
        found.update(zip(places, how([leaves[i] for i in places]), strict=True))
    results = iter([found[i] for i in range(len(leaves))])
    return tree.tree_map(lambda _: next(results), values)


def _gathered(
    same: Sequence[torch.Tensor], world: World, label: str
) -> list[torch.Tensor]:
    rows = [_row(leaf).detach() for leaf in same]
    flats = all_gather(pack(rows), world, label=label)
    sizes = [row.numel() for row in rows]
    by_rank = [flat.split(sizes) for flat in flats]
    return [
        torch.cat([parts[i].view_as(row) for parts in by_rank])
        for i, row in enumerate(rows)
    ]


def _check_reducible(dtype: torch.dtype, op: str) -> None:
    if dtype in _COMPLEX and op not in ("sum", "mean"):
        msg = (
            f"af.reduce(op={op!r}): {dtype} has no order, and no product across ranks."
        )
        raise ArgumentError(msg)
    if dtype not in _REAL | _COMPLEX:
        msg = f"af.reduce: ranks cannot reduce {dtype}; convert it to another dtype."
        raise ArgumentError(msg)


def _reduced(
    same: Sequence[torch.Tensor], world: World, op: str, label: str
) -> Sequence[torch.Tensor]:
    dtype = same[0].dtype
    flat = pack(same)
    if dtype in _WIDER:
        flat = flat.to(_WIDER[dtype])
    if world.size > 1:
        numbers = torch.view_as_real(flat) if dtype.is_complex else flat
        with naming(label, world):
            dist.all_reduce(numbers, op=_OPS[op], group=world.group)
    if op == "mean":
        flat = flat / world.size
    elif flat.dtype is not dtype and (dtype is not torch.bool or op != "sum"):
        flat = flat.to(dtype)
    return cut(flat, same)


def _row(leaf: torch.Tensor) -> torch.Tensor:
    return leaf if leaf.ndim else leaf.reshape(1)
