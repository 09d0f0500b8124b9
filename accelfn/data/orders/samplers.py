# SPDX-License-Identifier: Apache-2.0
"""A torch sampler as an order: drawn once an epoch, on every rank alike."""

import operator
from collections.abc import Iterable
from itertools import islice
from typing import Any, cast

import attrs
import numpy as np
import torch
from torch.utils.data import RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from accelfn.base import draws
from accelfn.data.length import promised_length
from accelfn.data.orders.order import (
    AtPositions,
    Order,
    Sequential,
    Shuffled,
    checked,
    looked_up,
)
from accelfn.errors import DataError


@attrs.frozen(eq=False)
class Sampled:
    """A torch sampler, drawn once an epoch on every rank alike: whole, for it cannot be asked."""

    sampler: Any

    def __attrs_post_init__(self) -> None:
        """Refuse one that gives each rank a part of its own."""
        refuse_distributed(self.sampler)

    @property
    def name(self) -> str:
        """The sampler's class."""
        return type(self.sampler).__name__

    def num_samples(self, n: int) -> int:
        """Return the sampler's length."""
        return _length_of(self.sampler)

    def of_epoch(self, n: int, *, seed: int, epoch: int, **_: Any) -> AtPositions:
        """Draw the epoch."""
        drawn = drawn_once(self.sampler, seed=seed, epoch=epoch)
        return looked_up(checked(np.array(drawn), n=n, where=self.name))


def order_of_sampler(sampler: Any, n: int) -> Order:
    """Return the order that a torch sampler over n samples stands for.

    One that takes each of them once, in order or shuffled, is not drawn from.
    """
    if is_plain(sampler, SequentialSampler) and len(sampler) == n:
        return Sequential()
    if (
        is_plain(sampler, RandomSampler)
        and not sampler.replacement
        and sampler.num_samples == len(sampler.data_source) == n
    ):
        return Shuffled()
    return Sampled(sampler)


def is_plain(sampler: Any, kind: type) -> bool:
    """Whether it is torch's own of a kind, or torchdata's, which only adds a state."""
    same = ("torchdata.stateful_dataloader.sampler", kind.__name__)
    found = type(sampler)
    return found is kind or (found.__module__, found.__name__) == same


def refuse_distributed(sampler: Any) -> None:
    """Raise if a sampler gives each rank a part already."""
    inner = getattr(sampler, "sampler", None)  # a batch sampler's
    if isinstance(sampler, DistributedSampler) or isinstance(inner, DistributedSampler):
        msg = (
            "A DistributedSampler gives each rank a part already, and af.shard_data() would"
            " cut it again. Give the dataset with shuffle=True, or the sampler that it wraps."
        )
        raise DataError(msg)


def drawn_once(sampler: Iterable[Any], *, seed: int, epoch: int) -> list[Any]:
    """Return what a sampler yields in an epoch, as a function of the seed and the epoch.

    torch's, numpy's and Python's generators are set from both, a `generator` of its own
    too, and `set_epoch` is called where there is one.

    Raises:
        DataError: it yields another number than its length says, or something else when it
            is asked again: then a run could not be resumed.
    """
    kind, length = type(sampler).__name__, _length_of(sampler)
    first, again = (_drawn(sampler, seed, epoch, length + 1) for _ in range(2))
    if len(first) != length:
        found = "more" if len(first) > length else len(first)
        msg = f"{kind} says that it has {length}, and gave {found} in epoch {epoch}."
        raise DataError(msg)
    if first != again:
        msg = (
            f"{kind} gave two different epochs {epoch} when drawn twice, so a run could not"
            " be resumed, and ranks would disagree. Let it draw from torch's, numpy's or"
            " Python's default generators, a torch.Generator named `generator`, or what"
            " set_epoch(epoch) tells."
        )
        raise DataError(msg)
    return first


def _drawn(sampler: Any, seed: int, epoch: int, most: int) -> list[Any]:
    """Return what a sampler yields, up to so many: one may go on for ever."""
    key = draws.key(seed, "sampler", epoch)
    for each in (sampler, getattr(sampler, "sampler", None)):
        if callable(getattr(each, "set_epoch", None)):
            cast("Any", each).set_epoch(epoch)
        own = getattr(each, "generator", None)
        if isinstance(own, torch.Generator):
            own.manual_seed(key)
    with draws.seeded() as seeds:
        seeds.begin(key)
        return [_plain(each) for each in islice(sampler, most)]


def _plain(index: Any) -> Any:
    """Return an index, or a list of them, as plain integers; anything else as it is."""
    if isinstance(index, (torch.Tensor, np.ndarray)):
        return cast("Any", index).tolist()
    if isinstance(index, (list, tuple)):
        return [_plain(each) for each in cast("list[Any]", index)]
    return operator.index(index) if hasattr(index, "__index__") else index


def _length_of(sampler: Any) -> int:
    length = promised_length(sampler)
    if length is None:
        msg = f"{type(sampler).__name__} has no length; a sampler needs __len__."
        raise DataError(msg)
    return length
