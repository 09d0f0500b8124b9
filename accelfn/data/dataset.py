# SPDX-License-Identifier: Apache-2.0
"""`Data`: a dataset and the way training draws from it, as a value."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Self, TypeAlias, cast

import attrs
import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from accelfn import streams, tree
from accelfn.cursor import Cursor
from accelfn.data.batch import Batch, Filler
from accelfn.data.fetch import Collate, Fetch, Rows, rows_of
from accelfn.data.order import Indices, OrderFunction, epoch_order
from accelfn.data.plan import Plan, Span
from accelfn.errors import ArgumentError, DataError

_BLOCK = 65_536  # positions whose order is computed at once; 0.5 MB
_REMAINDERS = ("short", "pad", "drop")


def _is_positive(owner: object, field: Any, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        msg = (
            f"af.{type(owner).__name__}({field.name}={value!r}): expected an integer of"
            " at least 1."
        )
        raise ArgumentError(msg)


def _is_remainder(_owner: object, _field: object, value: object) -> None:
    if value not in _REMAINDERS:
        msg = (
            f"af.Data(remainder={value!r}): expected one of"
            f" {', '.join(map(repr, _REMAINDERS))}."
        )
        raise ArgumentError(msg)


def _is_num_workers(_owner: object, _field: object, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        msg = (
            f"af.Data(num_workers={value!r}): expected a number of processes, 0 or"
            " more."
        )
        raise ArgumentError(msg)


@attrs.frozen(eq=False, repr=False)
class Data:
    """A map-style dataset, and the order and size in which an update takes its samples.

    Attributes:
        dataset: anything with `__len__` and `__getitem__` (or `__getitems__`). Made of
            tensors (a tensor, a tuple or dict of them, a TensorDataset, a Subset of
            one) it is gathered a batch at a time.
        batch_size: samples per update, over all ranks and micro-batches together.
        shuffle: whether each epoch has an order of its own, a pure function of the state's
            seed and the epoch; the same for every number of ranks.
        remainder: what becomes of a short last batch. "short": it is split like any other,
            and its mean is over what it has. "pad": it is filled from the start of the
            epoch's order, cyclically; those repeats count in its mean, and evaluation
            leaves them out. "drop": it is left out.
        collate: makes a batch of a list of samples; default torch's.
        num_workers: processes that read ahead; 0 reads in this one.
        order: a user's own order instead, `(seed, epoch, n) -> indices`.

    Raises:
        DataError: the dataset is empty, has no length, or is iterable only.
        ArgumentError: a count that is not positive, an unknown remainder.

    Example:
        >>> data = Data(torch.arange(10), batch_size=4)
        >>> len(data), data.updates_per_epoch
        (10, 3)
    """

    dataset: Any
    batch_size: int = attrs.field(validator=_is_positive, kw_only=True)
    shuffle: bool = attrs.field(default=False, kw_only=True)
    remainder: str = attrs.field(default="short", validator=_is_remainder, kw_only=True)
    collate: Collate | None = attrs.field(default=None, kw_only=True)
    num_workers: int = attrs.field(default=0, validator=_is_num_workers, kw_only=True)
    order: OrderFunction | None = attrs.field(default=None, kw_only=True)
    _rows: Rows | None = attrs.field(init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        """Look at the dataset once."""
        for name in ("collate", "order"):
            value = getattr(self, name)
            if value is not None and not callable(value):
                msg = f"af.Data({name}={value!r}): expected a function."
                raise ArgumentError(msg)
        object.__setattr__(self, "_rows", rows_of(self.dataset))
        if self.order is not None and self.shuffle:
            msg = (
                "af.Data(shuffle=True, order=...): an order of your own is not shuffled"
                " again. Give one of the two."
            )
            raise ArgumentError(msg)
        if len(self) == 0:
            msg = f"af.Data: the dataset ({type(self.dataset).__name__}) is empty."
            raise DataError(msg)
        if self.updates_per_epoch == 0:
            msg = (
                f'af.Data(batch_size={self.batch_size}, remainder="drop"): the dataset'
                f" has {len(self)} samples, so every batch would be dropped. Take a"
                " smaller batch_size."
            )
            raise DataError(msg)

    @classmethod
    def from_loader(cls, loader: "DataLoader[Any]") -> Self:
        """Return what a torch DataLoader says, with its batch size as samples per update.

        Kept: dataset, batch size, shuffling, drop_last, collate_fn, num_workers. Its own
        random order is not: accelfn's is a function of the state's seed.

        Raises:
            DataError: it has a sampler or a dataset of another kind.
        """
        if not isinstance(loader, DataLoader):
            msg = f"from_loader: expected a torch DataLoader, got {type(loader).__name__}."
            raise DataError(msg)
        sampler = loader.sampler
        batched = type(loader.batch_sampler) is BatchSampler and loader.batch_size
        plain = type(sampler) is SequentialSampler
        random = (
            type(sampler) is RandomSampler
            and not sampler.replacement
            and (sampler.num_samples == len(cast("Any", loader.dataset)))
        )
        if not batched or not (plain or random):
            msg = (
                f"from_loader: sampler {type(sampler).__name__} with batch sampler"
                f" {type(loader.batch_sampler).__name__} is not kept. Give"
                " af.Data(dataset, batch_size=..., order=lambda seed, epoch, n: ...)"
                " the order that you want."
            )
            raise DataError(msg)
        collate = loader.collate_fn
        return cls(
            loader.dataset,
            batch_size=cast("int", loader.batch_size),
            shuffle=random,
            remainder="drop" if loader.drop_last else "short",
            collate=None if collate is default_collate else collate,
            num_workers=loader.num_workers,
        )

    def __len__(self) -> int:
        """Return the number of samples.

        Raises:
            DataError: the dataset does not know it.
        """
        if self._rows is not None:
            return len(self._rows)
        if isinstance(self.dataset, Mapping) and not self.dataset:
            return 0
        unordered = isinstance(self.dataset, (IterableDataset, Mapping))
        if unordered or not hasattr(self.dataset, "__getitem__"):
            msg = (
                f"af.Data: {type(self.dataset).__name__} cannot be read by index;"
                " expected a dataset with __len__ and __getitem__."
            )
            raise DataError(msg)
        try:
            return len(self.dataset)
        except (TypeError, NotImplementedError) as error:
            msg = (
                f"af.Data: {type(self.dataset).__name__} has no length; expected a"
                " dataset with __len__."
            )
            raise DataError(msg) from error

    @property
    def updates_per_epoch(self) -> int:
        """How many updates one pass over the data makes."""
        return self.plan().updates_per_epoch

    def __repr__(self) -> str:
        """Show what the dataset is, not what is in it."""
        order = (
            "own order" if self.order else "shuffled" if self.shuffle else "in order"
        )
        return (
            f"<Data of {len(self)} samples ({type(self.dataset).__name__}), {order}, batches"
            f" of {self.batch_size}>"
        )

    def plan(self, *, rank: int = 0, world_size: int = 1) -> Plan:
        """Return the plan in which one process takes every sample."""
        return Plan(
            num_samples=len(self),
            batch_size=self.batch_size,
            remainder=self.remainder,
            world_rank=rank,
            world_size=world_size,
        )

    def read(
        self, plan: Plan, *, start: Cursor, seed: int, device: torch.device
    ) -> Iterator[Batch]:
        """Yield the batches of one epoch from a cursor on, on `device`."""
        order = epoch_order(
            n=len(self),
            seed=seed,
            epoch=start.epoch,
            shuffle=self.shuffle,
            own=self.order,
        )
        source = self.dataset if self._rows is None else self._rows
        fetch = Fetch(source, self.collate, streams.key(seed, "data", start.epoch))
        drawn = _drawn(plan, start, _in_blocks(order, plan))
        if self.num_workers:
            pairs = _through_workers(fetch, drawn, self.num_workers)
        else:
            pairs = ((piece, fetch(piece[1])) for piece in drawn)
        return _assembled(plan, start, pairs, device)


_Piece: TypeAlias = tuple[Span, Indices]
"""A micro-batch: its positions, and the dataset indices that are read for it."""


def _in_blocks(
    order: Callable[[Indices], Indices], plan: Plan
) -> Callable[[int, int], Indices]:
    """Return `(start, stop) -> indices`, computing the order a block at a time."""
    block, first, last = np.empty(0, np.int64), 0, 0

    def indices(start: int, stop: int) -> Indices:
        nonlocal block, first, last
        if not first <= start <= stop <= last:
            first, last = start, max(stop, min(start + _BLOCK, plan.num_samples))
            block = order(np.arange(first, last, dtype=np.int64) % plan.num_samples)
        return block[start - first : stop - first]

    return indices


def _drawn(
    plan: Plan, start: Cursor, indices: Callable[[int, int], Indices]
) -> Iterator[_Piece]:
    """Yield this rank's micro-batches in order; an empty one reads one stand-in."""
    for batch in plan.spans(start.samples):
        drawn = indices(*batch)
        for low, high in plan.parts(batch):
            stop = high if high > low else low + 1
            begin = min(low, batch[1] - 1) - batch[0]
            yield (low, high), drawn[begin : begin + stop - low]


def _through_workers(
    fetch: Fetch, pieces: Iterator[_Piece], num_workers: int
) -> Iterator[tuple[_Piece, Any]]:
    """Yield the pieces with their values, read ahead by torch's DataLoader."""
    sent: list[_Piece] = []

    def to_workers() -> Iterator[Indices]:
        for piece in pieces:
            sent.append(piece)
            yield piece[1]

    loader: DataLoader[Any] = DataLoader(
        cast("Any", _Fetched(fetch)),
        batch_size=None,
        sampler=cast("Any", to_workers()),
        num_workers=num_workers,
        collate_fn=_as_is,
        timeout=300.0,
        # DataLoader draws a base seed from the global generator unless it has its own
        generator=torch.Generator().manual_seed(fetch.key),
    )
    try:
        for value in loader:
            yield sent.pop(0), value
    except RuntimeError as error:
        reading = sent[0][1].tolist()[:8] if sent else []
        msg = (
            f"A data worker failed while the samples at dataset indices {reading} ..."
            f" were due: {error}"
        )
        raise DataError(msg) from error


class _Fetched:
    """A dataset whose index is an array of indices and whose sample is a micro-batch."""

    def __init__(self, fetch: Fetch) -> None:
        self.fetch = fetch

    def __getitem__(self, indices: Indices) -> Any:
        return self.fetch(indices)


def _as_is(value: Any) -> Any:
    return value


def _assembled(
    plan: Plan,
    start: Cursor,
    pairs: Iterator[tuple[_Piece, Any]],
    device: torch.device,
) -> Iterator[Batch]:
    """Group the micro-batches of an update into a batch."""
    move = partial(tree.to_device, device=device)
    for batch in plan.spans(start.samples):
        count = len(plan.parts(batch))
        taken = [next(pairs) for _ in range(count)]
        spans = [span for (span, _), _ in taken]
        after = plan.after(start, batch)
        yield Batch(
            micro_batches=tuple([move(value) for _, value in taken]),
            weights=tuple([high - low for low, high in spans]),
            start=start,
            cursor=after,
            num_samples=batch[1] - batch[0],
            parts_indices=tuple([indices for (_, indices), _ in taken]),
            parts_filler=tuple([_filler(span, plan.num_samples) for span in spans]),
        )
        start = after


def _filler(span: Span, num_samples: int) -> Filler:
    low, high = span
    if high == low:
        return True
    if high <= num_samples:
        return False
    return np.arange(low, high) >= num_samples
