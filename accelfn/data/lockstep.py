# SPDX-License-Identifier: Apache-2.0
"""`lockstep`: streams of unequal length, a rank each, without a rank that waits in vain."""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from accelfn.base.calling import called
from accelfn.collectives import all_gather
from accelfn.collectives.agreed import check_world
from accelfn.data import Batch
from accelfn.errors import ArgumentError, BatchError, DataError
from accelfn.world import World

_ENDS = ("last", "first", "together")


@called
def lockstep(
    iterable: Iterable[Any], world: World, *, ends: str = "last"
) -> Iterator[Batch]:
    """Yield this rank's own batches, as many on every rank.

    For loops over what ranks read for themselves: a step over `af.batches` needs no lockstep.
    A step takes what is yielded, and does not move the state's cursor. A list is taken for a
    rank's micro-batches, but for one that a DataLoader yields, which is its batch.

    Args:
        iterable: of this rank's batches; ranks may have different numbers of them.
        world: whose ranks go together; those that share a batch ("cp", "tp") give the same.
        ends: "last": when all ranks have ended; one that has ended takes part with its last
            batch, whose weight is 0. "first": as soon as one rank has ended. "together": all
            must end at once.

    Yields:
        Batches; `weights` of 0 mark those that do not count.

    Law: with "last", the mean over all that was seen is that of all ranks' samples.

    Cost: one all-gather of an integer a batch; with "last", the last batch is kept.

    Raises:
        DataError: ranks ended apart, and `ends="together"`; or one has no batch at all to
            stand in, and `ends="last"`.
        BatchError: a list of micro-batches has none.
        ArgumentError: `ends` is another word, or there is nothing to iterate over.
    """
    if ends not in _ENDS:
        expected = ", ".join(map(repr, _ENDS))
        msg = f"af.lockstep(ends={ends!r}): expected one of {expected}."
        raise ArgumentError(msg)
    check_world("af.lockstep", world)
    if not isinstance(iterable, Iterable):
        msg = (
            f"af.lockstep({type(iterable).__name__}): expected this rank's batches, as an"
            " iterable; an empty list where it has none."
        )
        raise ArgumentError(msg)
    batches = iter(iterable)
    if isinstance(iterable, DataLoader):
        # a list is what it makes of samples that are tuples
        batches = ([each] for each in batches)
    return _together(batches, world.batch, ends)


def _together(items: Iterator[Any], ranks: World, ends: str) -> Iterator[Batch]:
    number, last = 0, None
    while True:
        mine = [last := item for item in _next(items)]
        flags = all_gather(
            torch.tensor([len(mine)], device=ranks.device), ranks, label="lockstep"
        )
        having = [bool(flag) for flag in flags]
        if not any(having) or (ends == "first" and not all(having)):
            return
        without = [rank for rank, has in enumerate(having) if not has]
        if without and ends == "together":
            msg = (
                f"af.lockstep: rank {without[0]} ran out at batch {number}, others have"
                f" {number + 1} or more. Give every rank as many, or say what is to become"
                ' of the rest with ends="last" or ends="first".'
            )
            raise DataError(msg)
        if without and number == 0:
            msg = (
                f"af.lockstep: rank {without[0]} of {ranks.size} has no batch, and so none"
                ' to stand in with weight 0. Give it one, or ends="first".'
            )
            raise DataError(msg)
        if isinstance(last, list) and not last:
            msg = (
                f"af.lockstep: batch {number} of rank {ranks.rank} is an empty list; a list is"
                " a rank's micro-batches, at least one. Leave the batch out."
            )
            raise BatchError(msg)
        yield _batch(last, having, ranks.rank)
        number += 1


def _next(items: Iterator[Any]) -> list[Any]:
    """Return the next item in a list, or an empty one."""
    for item in items:
        return [item]
    return []


def _batch(item: Any, having: list[bool], rank: int) -> Batch:
    values = tuple(item) if isinstance(item, list) else (item,)
    counts = having[rank]
    return Batch(
        micro_batches=values,
        weights=(None if counts else 0,) * len(values),
        start=None,
        cursor=None,
        num_samples=0,
        parts_indices=(np.empty(0, np.int64),) * len(values),
        parts_filler=(not counts,) * len(values),
        shares=partial(list, [[None if has else 0] * len(values) for has in having]),
    )
