# SPDX-License-Identifier: Apache-2.0
"""Epochs and fingerprints: the order of an epoch's samples, and a hash to compare data."""

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import attrs
import numpy as np
import torch

from accelfn.base import draws, tree
from accelfn.data.order import (
    AtPositions,
    Indices,
    check_indices,
    order_of_array,
    read_sampler,
    shuffle_positions,
)
from accelfn.data.plan import (
    Cursor,
    Cut,
    EvenCut,
    Plan,
    Span,
    UnevenCut,
)
from accelfn.data.sources import Source
from accelfn.errors import DataError

if TYPE_CHECKING:
    from accelfn.data.dataset import Data
    from accelfn.data.plan import budget

_PROBES = 8
"""How many samples are read: the first, the last, and some between."""


def form_of(data: "Data") -> dict[str, Any]:
    """Describe batching and order as plain data, without reading samples."""
    size = data.batch_size
    form: dict[str, Any] = {
        "batch_size": size if isinstance(size, int) else repr(size or "sampler"),
        "remainder": data.remainder,
    }
    if data.is_stream:
        return form
    sampler = data.batch_sampler
    order = data.ordering.name if sampler is None else type(sampler).__name__
    return form | {"samples": len(data), "order": order}


def fingerprint_of(source: Source) -> str:
    """Return a hash of a few samples; leave out samples that differ when read twice.

    Cost: eight samples are read twice, once for each `Data` that is saved.

    Raises:
        DataError: a sample cannot be read; without it, the hash would be another.
    """
    digest = hashlib.sha256()
    for place in places_of(source):
        try:
            first, again = (_hash_of(sample_at(source, place)) for _ in range(2))
        except Exception as error:
            msg = (
                f"sample {place} of the dataset cannot be read, and a resumed run checks its"
                f" data by a hash of some samples: {type(error).__name__}: {error}. Try again"
                ' if it can be read now, or write af.Data(fingerprint="a name of the data").'
            )
            raise DataError(msg) from error
        if first == again:
            digest.update(first)
    return digest.hexdigest()[:16]


def places_of(source: Source) -> list[int]:
    """Return the indices of the samples to hash."""
    n = len(source)
    return np.unique(np.linspace(0, n - 1, min(_PROBES, n)).astype(np.int64)).tolist()


def sample_at(source: Source, place: int) -> Any:
    """Return a sample; random numbers from default generators are the same each time."""
    with draws.seeded() as drawing:

        def begin(_place: int) -> None:
            drawing.begin(0)

        begin(0)
        return source.samples(np.array([place]), begin)[0]


def _hash_of(sample: Any) -> bytes:
    digest = hashlib.sha256()
    for leaf in tree.tree_leaves(sample):
        digest.update(bytes_of(leaf))
    return digest.digest()


def bytes_of(leaf: Any) -> bytes:
    """Return bytes that identify a leaf; for an unknown object, those of its class."""
    if isinstance(leaf, torch.Tensor):
        with suppress(RuntimeError):  # a sparse tensor has no such bytes
            # a contiguous copy without a pending conjugation
            array = leaf.detach().cpu().clone(memory_format=torch.contiguous_format)
            head = f"{array.dtype}{tuple(array.shape)}".encode()
            return head + array.reshape(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(leaf, (np.ndarray, np.void)) and leaf.dtype.hasobject:
        return _bytes_of_objects(np.asarray(leaf))
    if isinstance(leaf, np.ndarray):
        return f"{leaf.dtype}{leaf.shape}".encode() + leaf.tobytes()
    if isinstance(leaf, (str, int, float, bool, bytes, type(None), np.generic)):
        return f"{leaf!r};".encode()
    return f"<{type(leaf).__qualname__}>".encode()


def _bytes_of_objects(array: np.ndarray[Any, Any]) -> bytes:
    """Return bytes that identify an array of objects; its own bytes are addresses."""
    names = array.dtype.names
    parts = [array[n] for n in names] if names else array.ravel().tolist()
    result = f"{array.dtype}{array.shape}".encode()
    for part in parts:
        leaves = (_digest(bytes_of(leaf)) for leaf in tree.tree_leaves(part))
        result += _digest(b"".join(leaves))
    return result


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


# An epoch as a value: the dataset index of each position, and the ends of batches.


_FIRST_BLOCK, _BLOCK, _UPDATES = 1_024, 65_536, 2_048
"""This rank's positions of the first block and later blocks, and updates of a block."""
_MOST_SORTED = 1 << 22
"""Most positions of all ranks in a block of an order that sorts, because it sorts them all."""


@attrs.frozen(eq=False)
class Epoch:
    """One pass over the data.

    Attributes:
        number: the epoch's number, from 0.
        num_samples: number of positions.
        order: maps positions to dataset indices.
        cut: the ends of batches.
        key: the key of random numbers.
        sorts: whether the order also computes positions that were not requested.
    """

    number: int
    num_samples: int
    order: AtPositions
    cut: Cut
    key: int
    sorts: bool = False

    def shuffled_batches(self, key: int) -> "Epoch":
        """Return the epoch with its batches in a random order, the last one last."""
        stops = np.fromiter((stop for _, stop in self.cut.spans(0)), np.int64)
        starts = np.concatenate([[0], stops[:-1]])
        indices = self.order(np.arange(self.num_samples))
        count = len(stops) - 1
        turns = np.arange(len(stops))
        if count > 0:
            turns[:count] = shuffle_positions(turns[:count], n=count, key=key)
        sizes = (stops - starts)[turns]
        ends = np.cumsum(sizes)
        places = np.arange(self.num_samples)
        batch = np.searchsorted(ends, places, side="right")
        sources = starts[turns][batch] + places - (ends - sizes)[batch]
        order = order_of_array(indices[sources])
        return attrs.evolve(self, order=order, cut=UnevenCut(ends))


def epoch_of(data: "Data", *, seed: int, number: int) -> Epoch:
    """Return one pass over the data, for a state's seed."""
    key, n = draws.key(seed, "data", number), len(data.source)
    if data.batch_sampler is not None:
        return _sampler_epoch(data.batch_sampler, n, seed=seed, number=number, key=key)
    size = data.batch_size if isinstance(data.batch_size, int) else None
    order = data.ordering.of_epoch(n, seed=seed, epoch=number, batch_size=size)
    num_samples = len(data)
    if size is not None:
        cut = EvenCut(num_samples, size, data.remainder)
        sorts = getattr(data.ordering, "sorts", False)
        return Epoch(number, num_samples, order, cut, key, sorts=sorts)
    cut = cast("budget", data.batch_size).cut(order(np.arange(num_samples)))
    epoch = Epoch(number, num_samples, order, cut, key)
    if getattr(data.ordering, "shuffles_batches", False):
        return epoch.shuffled_batches(draws.key(seed, "batches", number))
    return epoch


def _sampler_epoch(sampler: Any, n: int, *, seed: int, number: int, key: int) -> Epoch:
    """Return the epoch of a batch sampler over n samples.

    Raises:
        DataError: it does not give lists of indices, or gives an empty list.
    """
    name = f"batch_sampler ({type(sampler).__name__})"
    batches = read_sampler(sampler, seed=seed, epoch=number)
    wrong = [batch for batch in batches if not isinstance(batch, list)]
    if wrong:
        msg = f"{name} gave {wrong[0]!r} for an update; expected a list of indices."
        raise DataError(msg)
    empty = [i for i, batch in enumerate(batches) if not batch]
    if empty or not batches:
        msg = f"{name} gave no samples for update {empty[0] if empty else 0}."
        raise DataError(msg)
    flat = check_indices(
        np.concatenate([np.asarray(batch) for batch in batches]), n=n, where=name
    )
    stops = np.cumsum([len(batch) for batch in batches])
    return Epoch(number, len(flat), lambda at: flat[at], UnevenCut(stops), key)


class Portion(NamedTuple):
    """A rank's part of one update, before it is read.

    A named tuple takes half the time of a frozen record, and each update makes a portion.

    Attributes:
        start: the cursor before the update.
        after: the cursor after the update.
        num_samples: samples of the update, on all ranks.
        spans: positions of the rank's micro-batches.
        indices: dataset indices to read for each; an empty micro-batch reads a stand-in.
        own: how many of the epoch's positions are samples; later positions are repeats.
        key: the key of random numbers.
        shares: how many samples each rank has, if ranks have exchanged the numbers.
    """

    start: Cursor
    after: Cursor
    num_samples: int
    spans: tuple[Span, ...]
    indices: tuple[Indices, ...]
    own: int
    key: int
    shares: list[tuple[int, ...]] | None = None


def portions(epoch: Epoch, plan: Plan, start: Cursor) -> Iterator[Portion]:
    """Yield this rank's part of an epoch's updates from a cursor on.

    Cost: the order computes only the positions of this rank, so an update costs the same on any
    number of ranks. An order that sorts computes more positions.
    """
    num_samples, end, key = epoch.num_samples, epoch.cut.end(start.samples), epoch.key
    following = Cursor(epoch.number + 1)
    most = _MOST_SORTED if epoch.sorts else num_samples
    for updates in _blocks(epoch.cut.spans(start.samples), plan.num_shares, most):
        parts = [tuple(plan.parts(update)) for update in updates]
        places = _places(updates, parts)
        if updates[-1][1] > num_samples:  # padded: filled from the start of the order
            places %= num_samples
        block, first = epoch.order(places), 0
        for (low, high), spans in zip(updates, parts, strict=True):
            indices: list[Indices] = []
            for begin, stop in spans:
                last = first + (stop - begin or 1)
                indices.append(block[first:last])
                first = last
            after = Cursor.reached(epoch.number, high) if high < end else following
            yield Portion(
                start, after, high - low, spans, tuple(indices), num_samples, key
            )
            start = after


def _blocks(spans: Iterable[Span], num_shares: int, most: int) -> Iterator[list[Span]]:
    """Yield blocks of updates to order at once: the first is small, for a quick start.

    A block ends at its largest number of positions of all ranks.
    """
    block: list[Span] = []
    size = _FIRST_BLOCK
    for low, high in spans:
        block.append((low, high))
        positions = high - block[0][0]
        if positions >= min(size * num_shares, most) or len(block) == _UPDATES:
            yield block
            block, size = [], min(16 * size, _BLOCK)
    if block:
        yield block


def _places(updates: list[Span], parts: list[tuple[Span, ...]]) -> Indices:
    """Return the positions to read; an empty part reads the position next to it."""
    runs = [
        (begin if begin < high else high - 1, stop - begin or 1)
        for (_, high), spans in zip(updates, parts, strict=True)
        for begin, stop in spans
    ]
    firsts, counts = np.array(runs, np.int64).T
    ends = np.cumsum(counts)
    return np.arange(ends[-1]) + np.repeat(firsts - ends + counts, counts)
