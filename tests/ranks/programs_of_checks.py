# SPDX-License-Identifier: Apache-2.0
"""Calls of accelfn's collectives of which no two go together, in worlds that are checked."""

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch

import accelfn as af
from accelfn.errors import CollectiveMismatchError
from tests.internals import collectives


def mine(world: af.World, *shape: int) -> torch.Tensor:
    return torch.full(shape, world.rank + 1.0)


def pair(world: af.World, *names: str) -> dict[str, torch.Tensor]:
    return {name: mine(world, 2) + ord(name) for name in names}


def several(world: af.World, *, reverse: bool = False) -> list[Any]:
    """Return for each rank tensors of as many rows as its number."""
    given = [
        [torch.full((rank, 2), world.rank), torch.tensor(world.rank * 0.5)]
        for rank in range(world.size)
    ]
    return [each[::-1] for each in given] if reverse else given


CALLS: dict[str, Callable[[af.World], Any]] = {
    "reduce 3": lambda w: af.all_reduce(mine(w, 3), w),
    "reduce 2": lambda w: af.all_reduce(mine(w, 2), w),
    "reduce 1 by 2": lambda w: af.all_reduce(mine(w, 1, 2), w),
    "reduce float64": lambda w: af.all_reduce(mine(w, 3).double(), w),
    "reduce int64": lambda w: af.all_reduce(mine(w, 3).long(), w),
    "reduce the greatest": lambda w: af.all_reduce(mine(w, 3), w, "max"),
    "reduce labelled": lambda w: af.all_reduce(mine(w, 3), w, label="counts"),
    "reduce a and b": lambda w: af.all_reduce(pair(w, "a", "b"), w),
    "reduce b and c": lambda w: af.all_reduce(pair(w, "b", "c"), w),
    "reduce a list": lambda w: af.all_reduce([*pair(w, "a", "b").values()], w),
    "reduce nothing": lambda w: af.all_reduce({}, w),
    "gather 3": lambda w: af.all_gather(mine(w, 3), w),
    "gather 2": lambda w: af.all_gather(mine(w, 2), w),
    "gather for gradients": lambda w: af.all_gather(mine(w, 2), w, grad=True),
    "gather for its gradients": lambda w: af.all_gather(
        mine(w, 2).requires_grad_(), w, grad=True
    ),
    "gather ragged": lambda w: af.all_gather(mine(w, w.rank, 2), w, ragged=True),
    "gather ragged 3": lambda w: af.all_gather(mine(w, w.rank, 3), w, ragged=True),
    "pad": lambda w: af.pad_across(mine(w, 2, w.rank), w, dim=1),
    "pad the other way": lambda w: af.pad_across(mine(w, w.rank, 2), w, dim=0),
    "broadcast": lambda w: af.broadcast(mine(w, 3), w),
    "broadcast from 1": lambda w: af.broadcast(mine(w, 3), w, root=1),
    "broadcast 2": lambda w: af.broadcast(mine(w, 2), w),
    "objects": lambda w: af.all_gather_objects("ab" * w.rank, w),
    "pickles": lambda w: af.all_gather_objects("ab" * w.rank, w, pickle=True),
    "object of 0": lambda w: af.broadcast_object([w.rank], w),
    "object of 1": lambda w: af.broadcast_object([w.rank], w, root=1),
    "scatter": lambda w: af.scatter([*range(w.size)] if w.is_main else None, w),
    "all to all": lambda w: af.all_to_all(several(w), w),
    "all to all reversed": lambda w: af.all_to_all(several(w, reverse=True), w),
    "mean of a": lambda w: (af.Metrics({"a": (w.rank, 1)})).all_reduce_mean(w),
    "mean of b": lambda w: (af.Metrics({"b": (w.rank, 1)})).all_reduce_mean(w),
    "any": lambda w: af.any_rank(w.rank, w),
    "barrier": af.barrier,
    "texts": lambda w: collectives.gather_text("a" * w.rank, w, label="texts"),
    "sums": lambda w: collectives.sum_(mine(w, 3), w, label="sums"),
}


def checked(world: af.World) -> af.World:
    """Return the world of the same ranks that compares what they are about to do."""
    return attrs.evolve(world, group=world.group, checked=True)


def meet(world: af.World, names: Sequence[str]) -> str:
    """Make the call that is this rank's; return what the ranks are told, if anything.

    What the call gives is what it gives unchecked; and after an error the world goes on.
    """
    told, asking = "", checked(world)
    try:
        found = CALLS[names[world.rank]](asking)
    except CollectiveMismatchError as error:
        told = str(error)
    else:
        expected = CALLS[names[world.rank]](world)
        assert repr(expected).split(", grad_fn")[0] == repr(found).split(", grad_fn")[0]
    assert af.all_gather_objects(world.rank, asking) == list(range(world.size))
    return told
