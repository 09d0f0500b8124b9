# SPDX-License-Identifier: Apache-2.0
"""`all_to_all`: each rank has something for each, and gets what each has for it."""

import math
from collections.abc import Sequence
from itertools import accumulate, islice, pairwise
from typing import TypeAlias, TypeVar

import torch
import torch.distributed as dist

from accelfn.base import tree
from accelfn.base.calling import called
from accelfn.base.valueless import readable
from accelfn.collectives.agreed import agreed
from accelfn.collectives.naming import naming
from accelfn.collectives.packed import pack
from accelfn.collectives.shares import check_stand_ins
from accelfn.collectives.trees import tensors_of
from accelfn.errors import ArgumentError
from accelfn.world import World

T = TypeVar("T")
Shapes: TypeAlias = list[list[int]]


@called
def all_to_all(
    values: Sequence[T],
    world: World,
    *,
    equal: bool = False,
    label: str = "all_to_all",
) -> list[T]:
    """Give each rank its own of the values; return what each rank gave this one.

    Args:
        values: a tree of tensors for each rank, in rank order. They have one structure, one
            dtype and one number of dimensions at each of its places, on all ranks; sizes may
            be any.
        world: whose ranks take part.
        equal: whether all ranks give all ranks tensors of the same shapes, which are then not
            exchanged first.
        label: what the ranks are doing.

    Returns: a list of trees, in rank order.

    Law: twice gives everything back; the same for all is `gather_objects`.

    Cost: one all-to-all of the sizes, unless they are equal, and one of the bytes, whatever
    the dtypes.

    Raises:
        ArgumentError: there is not one value for each rank, they are of several structures, a
            leaf is no tensor, or shapes that are said to be equal are not.
    """
    check_stand_ins("af.all_to_all", world)
    if not isinstance(values, (list, tuple)) or len(values) != world.size:
        count = len(values) if isinstance(values, Sequence) else type(values).__name__
        msg = (
            f"af.all_to_all: rank {world.rank} gave {count} values for {world.size} ranks;"
            " expected a list with one for each."
        )
        raise ArgumentError(msg)
    given = [tensors_of(each, label, world) for each in values]
    _check_alike(values)
    free = None if equal else ...
    world = agreed(world, "all_to_all", label, values[0], free=free)
    if world.size == 1 or not given[0]:
        return [tree.clone(each) for each in values]
    if equal:
        shapes = _equal(given)
        return _got(values[0], given, shapes, world, label)
    sizes = [[size for leaf in leaves for size in leaf.shape] for leaves in given]
    told = torch.tensor(sizes, dtype=torch.int64, device=readable(world.device))
    got = torch.empty_like(told)
    with naming(label, world):
        dist.all_to_all_single(got, told, group=world.group)
    shapes = [_cut(row, [leaf.ndim for leaf in given[0]]) for row in got.tolist()]
    return _got(values[0], given, shapes, world, label)


def _equal(given: list[list[torch.Tensor]]) -> list[Shapes]:
    """Return the shapes that all ranks are said to give this one: those that it gives."""
    shapes = [[list(leaf.shape) for leaf in leaves] for leaves in given]
    for rank, each in enumerate(shapes):
        if each != shapes[0]:
            msg = (
                f"af.all_to_all(equal=True): what is for rank 0 has the shapes {shapes[0]},"
                f" what is for rank {rank} {each}. Give tensors of the same shapes, or leave"
                " out equal."
            )
            raise ArgumentError(msg)
    return shapes


def _got(
    value: T,
    given: list[list[torch.Tensor]],
    shapes: list[Shapes],
    world: World,
    label: str,
) -> list[T]:
    """Return the trees that each rank gave this one, of these shapes."""
    parts = _swapped(given, shapes, world, label)
    return [
        _filled(value, given[0], row, part)
        for row, part in zip(shapes, parts, strict=True)
    ]


def _swapped(
    given: list[list[torch.Tensor]], shapes: list[Shapes], world: World, label: str
) -> Sequence[torch.Tensor]:
    """Return the bytes that each rank gave this one: tensors of these shapes."""
    sent = [torch.cat([_bytes(leaf) for leaf in leaves]) for leaves in given]
    coming = [sum(map(_num_bytes, given[0], row)) for row in shapes]
    got = sent[0].new_empty(sum(coming))
    leaving = [len(each) for each in sent]
    with naming(label, world):
        dist.all_to_all_single(got, torch.cat(sent), coming, leaving, group=world.group)
    return got.split(coming)


def _filled(
    value: T, leaves: list[torch.Tensor], shapes: Shapes, data: torch.Tensor
) -> T:
    """Return a tree like another, whose tensors have these shapes and bytes."""
    ends = accumulate(map(_num_bytes, leaves, shapes), initial=0)
    found = [
        data[begin:end].clone().view(leaf.dtype).view(shape)
        for leaf, shape, (begin, end) in zip(
            leaves, shapes, pairwise(ends), strict=True
        )
    ]
    return tree.with_leaves(value, found)


def _cut(sizes: list[int], dims: list[int]) -> Shapes:
    rest = iter(sizes)
    return [list(islice(rest, ndim)) for ndim in dims]


def _bytes(leaf: torch.Tensor) -> torch.Tensor:
    plain = leaf.detach().resolve_conj().resolve_neg()
    return pack([plain]).view(torch.uint8)


def _num_bytes(leaf: torch.Tensor, shape: list[int]) -> int:
    return math.prod(shape) * leaf.element_size()


def _check_alike(values: Sequence[object]) -> None:
    first = tree.outline(values[0], _kind)
    for rank, each in enumerate(values):
        found = tree.outline(each, _kind)
        if found != first:
            msg = (
                "af.all_to_all: the values have one structure, and tensors of one dtype and"
                f" number of dimensions in each of its places; that for rank 0 is {first},"
                f" that for rank {rank} {found}."
            )
            raise ArgumentError(msg)


def _kind(leaf: torch.Tensor) -> str:
    return f"{leaf.ndim}-dim {leaf.dtype}"
