# SPDX-License-Identifier: Apache-2.0
"""Sources of samples: classes that read a dataset by index.

A batch from an Arrow table, or from a dataset made of tensors, is read with one indexing call
for each tensor. So it takes about a tenth of the time for reading and stacking samples. Any
other map-style dataset is read with its `__getitems__`, if it has this method, or item by item.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from itertools import accumulate, pairwise
from operator import itemgetter
from typing import Any, TypeAlias, cast

import attrs
import numpy as np
import numpy.typing as npt
import torch
from torch.utils._pytree import tree_structure
from torch.utils.data import (
    IterableDataset,
    StackDataset,
    Subset,
    TensorDataset,
    default_collate,
)

from accelfn.base import draws, tree
from accelfn.base.arguments import is_number
from accelfn.data.order import (
    AtPositions,
    Indices,
    Order,
    Sequential,
    Shuffled,
    look_up_blocks,
    promised_length,
    shuffle_positions,
)
from accelfn.errors import ArgumentError, DataError

Begin: TypeAlias = Callable[[int], object]
"""A function that is called before each sample is read, with its place in the micro-batch."""


@attrs.frozen
class Rows:
    """A dataset made of tensors: a sample is a row of each tensor in a tree.

    Attributes:
        tensors: the tree of tensors.
        picked: the rows that belong to the dataset; None: all rows.
    """

    tensors: Any
    picked: torch.Tensor | None = None
    is_pure: bool = attrs.field(default=True, init=False)

    @cached_property
    def columns(self) -> tuple[torch.Tensor, ...] | None:
        """The tensors if the tree is a plain tuple of tensors, which is faster; else None."""
        if type(self.tensors) is not tuple:
            return None
        leaves = cast("tuple[Any, ...]", self.tensors)
        return leaves if all(type(leaf) is torch.Tensor for leaf in leaves) else None

    def __len__(self) -> int:
        """Return the number of samples."""
        if self.picked is not None:
            return len(self.picked)
        return len(tree.tensor_leaves(self.tensors)[0])

    def subset(self, indices: Sequence[int]) -> "Rows":
        """Return a dataset of the rows at these indices, without copying tensors."""
        rows, count = torch.as_tensor(indices, dtype=torch.int64), len(self)
        outside = rows[(rows < -count) | (rows >= count)]
        if len(outside):
            msg = f"A Subset has the index {int(outside[0])}, but its dataset has {count} samples."
            raise DataError(msg)
        rows = torch.where(rows < 0, rows + count, rows)
        return Rows(self.tensors, rows if self.picked is None else self.picked[rows])

    def samples(self, indices: Indices, begin: Begin) -> list[Any]:
        """Return a list of samples for the user's collate function.

        `begin` seeds the random generators, because the collate function may use them.
        """
        begin(0)
        rows = self._rows(indices).tolist()
        return [tree.tree_map(itemgetter(row), self.tensors) for row in rows]

    def batch(self, indices: Indices, begin: Begin) -> Any:
        """Return a batch with copies of the rows at these indices."""
        rows, columns = self._rows(indices), self.columns
        if columns is not None:
            return tuple([column.index_select(0, rows) for column in columns])
        return tree.tree_map(lambda leaf: leaf.index_select(0, rows), self.tensors)

    def _rows(self, indices: Indices) -> torch.Tensor:
        rows = torch.from_numpy(indices)  # pyright: ignore[reportUnknownMemberType]
        return rows if self.picked is None else self.picked[rows]


@attrs.frozen
class Table:
    """An Arrow table, which is recognized by its attributes.

    A sample is a dict with the value of each column. A batch is a dict of columns: tensors for
    columns of numbers, and lists for other columns.
    """

    table: Any
    is_pure: bool = attrs.field(default=True, init=False)

    def __len__(self) -> int:
        """Return the number of rows."""
        return self.table.num_rows

    def samples(self, indices: Indices, begin: Begin) -> list[Any]:
        """Return a list of samples for the user's collate function: dicts of Python values.

        `begin` seeds the random generators, because the collate function may use them.
        """
        begin(0)
        return self.table.take(indices).to_pylist()

    def batch(self, indices: Indices, begin: Begin) -> Any:
        """Return a batch, as a dict of columns."""
        rows = self.table.take(indices)
        return {name: self._column(rows, name) for name in rows.column_names}

    def _column(self, rows: Any, name: str) -> Any:
        column = rows.column(name)
        if column.null_count:
            advice = "Fill in the nulls, or pass af.Data(collate=...), a function of rows (dicts)"
            msg = f"Column {name!r} of the table has a null in this batch. {advice}."
            raise DataError(msg)
        values = column.to_numpy()
        if values.dtype.kind in "biuf":
            return torch.from_numpy(values.copy())
        try:
            return default_collate(column.to_pylist())
        except Exception as error:
            error.add_note(
                f"This error was raised when accelfn made a batch of the column {name!r}."
            )
            raise


@attrs.frozen
class Items:
    """A map-style dataset that is not made of tensors; it is read sample by sample."""

    dataset: Any
    is_pure: bool = attrs.field(default=False, init=False)

    def __len__(self) -> int:
        """Return the number of samples.

        Raises:
            DataError: the dataset has no length, or cannot be read by index.
        """
        dataset, length = self.dataset, promised_length(self.dataset)
        if isinstance(dataset, Mapping) and length == 0:
            return 0
        has_no_index = isinstance(dataset, (IterableDataset, Mapping))
        if length is None or has_no_index or not hasattr(dataset, "__getitem__"):
            problem = "cannot be read by index, or has no length"
            needs = "a dataset with __len__ and __getitem__"
            msg = f"af.Data: {type(dataset).__name__} {problem}; expected {needs}."
            raise DataError(msg)
        return length

    def samples(self, indices: Indices, begin: Begin) -> list[Any]:
        """Return a list of samples; if a sample cannot be read, the error names the sample."""
        dataset, inner = self.dataset, indices.tolist()
        # read from the inner dataset, because errors of Subset do not name the sample
        while type(dataset) is Subset:
            inner = [int(dataset.indices[i]) for i in inner]
            dataset = cast("Any", dataset).dataset
        fetch_all = _own_getitems(dataset)
        kind = type(dataset).__name__
        if fetch_all is not None:
            begin(0)
            return _fetch_items(fetch_all, kind, inner)
        items: list[Any] = []
        try:
            for place, index in enumerate(inner):
                begin(place)
                items.append(dataset[index])
        except Exception as error:
            at = len(items)
            sample = f"It is the sample at dataset index {indices[at]}."
            error.add_note(f"{kind}[{inner[at]}] raised this error. {sample}")
            raise
        return items

    def batch(self, indices: Indices, begin: Begin) -> Any:
        """Return a batch, collated by torch's function."""
        return collate_samples(default_collate, self.samples(indices, begin), indices)


def _fetch_items(
    fetch_all: Callable[[list[int]], Iterable[Any]], kind: str, indices: list[int]
) -> list[Any]:
    """Read samples with a dataset's `__getitems__`, and check their number."""
    call = f"{kind}.__getitems__({format_indices(indices)})"
    try:
        items = list(fetch_all(indices))
    except Exception as error:
        error.add_note(f"{call} raised this error.")
        raise
    if len(items) != len(indices):
        needs = f"a list of {len(indices)}, one for each index"
        msg = f"{call} returned {len(items)} samples; expected {needs}."
        raise DataError(msg)
    return items


def collate_samples(
    collate: Callable[[list[Any]], Any], samples: list[Any], indices: Indices
) -> Any:
    """Collate samples into a batch; if that fails, the error names the samples."""
    try:
        return collate(samples)
    except Exception as error:
        error.add_note(
            "This error was raised when accelfn made a batch of the samples at dataset indices"
            f" {format_indices(indices)}. If samples differ in size, pad them in a function of"
            " your own: af.Data(collate=fn), which gets the list of samples."
        )
        raise


def format_indices(indices: Sequence[int] | Indices) -> str:
    """Return the first indices as text, such as "[0, 1, ...]"."""
    first = ", ".join(str(index) for index in indices[:8])
    return f"[{first}{', ...' if len(indices) > 8 else ''}]"


def source_of(dataset: Any) -> "Source":
    """Return the source that reads a map-style dataset fastest.

    Raises:
        DataError: the dataset is a pandas table, which is not indexed by row numbers.
    """
    if isinstance(dataset, Joined):
        return dataset
    if hasattr(dataset, "iloc"):
        kind = type(dataset).__name__
        reason = "pandas indexes a table by names, not by row numbers"
        example = "{name: torch.tensor(table[name].to_numpy()) for name in table}"
        msg = f"af.Data({kind}): {reason}. Pass {example}, or a Dataset."
        raise DataError(msg)
    rows = rows_of(dataset)
    if rows is not None:
        return rows
    marks = ("take", "column_names", "num_rows", "to_pylist")
    if all(hasattr(dataset, mark) for mark in marks):
        return Table(dataset)
    return Items(dataset)


def _own_getitems(dataset: Any) -> Callable[[list[int]], Any] | None:
    """Return a dataset's `__getitems__`, but only if it fits the dataset's `__getitem__`.

    A subclass may define only `__getitem__`, and a wrapper may forward attributes to an inner
    dataset. Their `__getitems__` would bypass the subclass or wrapper, as it does in torch's
    DataLoader.
    """
    fetch_all = getattr(dataset, "__getitems__", None)
    if not callable(fetch_all) or type(dataset) is StackDataset:
        return None
    for fields in (getattr(dataset, "__dict__", {}), *map(vars, type(dataset).__mro__)):
        if "__getitems__" in fields:
            return cast("Callable[[list[int]], Any]", fetch_all)
        if "__getitem__" in fields:
            return None
    return None


def rows_of(dataset: Any) -> Rows | None:
    """Return a dataset made of tensors as `Rows`; None for other datasets.

    A subclass of TensorDataset or Subset may change its samples, so the result is None for it.

    Raises:
        DataError: the tensors have different numbers of rows.
    """
    if type(dataset) is Subset:
        inner = rows_of(dataset.dataset)
        return None if inner is None else inner.subset(dataset.indices)
    columns = tuple(dataset.tensors) if type(dataset) is TensorDataset else dataset
    if not isinstance(columns, (torch.Tensor, np.ndarray, tuple, Mapping)):
        return None
    tensors = tree.tree_map(_as_tensor, cast("Any", columns))
    leaves = tree.tree_leaves(tensors)
    if isinstance(columns, tuple) and any(isinstance(c, list) for c in columns):
        advice = "af.Data((torch.tensor(inputs), torch.tensor(targets)))"
        msg = f"af.Data: the dataset is a tuple of lists. Pass tensors or arrays: {advice}."
        raise DataError(msg)
    if not leaves or not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
        return None
    lengths = {len(leaf) if leaf.ndim else -1 for leaf in leaves}
    if len(lengths) > 1 or -1 in lengths:
        shapes = [tuple(leaf.shape) for leaf in leaves]
        needs = "all must have the same number of rows (dim 0)"
        msg = f"af.Data: the tensors of the dataset have the shapes {shapes}, but {needs}."
        raise DataError(msg)
    return Rows(tensors)


def _as_tensor(leaf: Any) -> Any:
    """Return a NumPy array of numbers as a tensor, mostly in the same memory.

    Other values are returned unchanged.

    Raises:
        DataError: torch does not have the array's dtype, or the array is masked.
    """
    if isinstance(leaf, torch.Tensor):
        return leaf.detach() if leaf.requires_grad else leaf
    if not isinstance(leaf, np.ndarray) or leaf.dtype.kind not in "biufc":
        return leaf
    array = cast("npt.NDArray[Any]", leaf)
    if isinstance(array, np.ma.MaskedArray):
        msg = "af.Data: torch has no masked arrays. Pass array.filled(value) instead."
        raise DataError(msg)
    if any(stride < 0 for stride in array.strides):
        array = np.ascontiguousarray(array)
    # torch warns of read-only memory, but rows are copied
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        try:
            return torch.from_numpy(array)
        except (TypeError, ValueError) as error:
            dtype, advice = array.dtype.str, "Pass array.astype(np.float32)"
            reason = f"the dataset has an array of dtype {dtype!r}, which torch does not have"
            msg = f"af.Data: {reason}. {advice}, or another dtype of torch."
            raise DataError(msg) from error


# `af.Data.mix`: several datasets as one, each with its share of an epoch's positions.


_LARGEST_BLOCK = 1 << 24
"""The largest number of positions in a block, which needs 128 MiB."""


def mix_datasets(
    datasets: Any, *, weights: Any, shuffle: bool
) -> tuple["Joined", "Mixed"]:
    """Join several datasets; return the joined dataset, and the order that mixes its samples.

    Raises:
        ArgumentError: the datasets or weights are invalid.
        DataError: a dataset is empty.
    """
    if not isinstance(datasets, Sequence):
        msg = f"af.Data.mix({datasets!r}): expected a list of datasets."
        raise ArgumentError(msg)
    sources = tuple(map(source_of, datasets))
    lengths = tuple(map(len, sources))
    if not sources or not all(lengths):
        msg = f"af.Data.mix: got lengths {lengths}; expected one or more datasets with samples."
        raise DataError(msg)
    shares = lengths if weights is None else _as_tuple(weights)
    are_valid = all(is_number(w) and 0 < w < float("inf") for w in shares)
    if len(shares) != len(sources) or not are_valid:
        needs = f"{len(sources)} finite numbers above 0"
        msg = f"af.Data.mix(weights={weights!r}): expected {needs}."
        raise ArgumentError(msg)
    order = Mixed(lengths, shares, Shuffled() if shuffle else Sequential())
    if order.block > _LARGEST_BLOCK:
        name = "the datasets' lengths" if weights is None else f"{weights!r}"
        share = f"less than one in {_LARGEST_BLOCK // 4:,} samples"
        reason = f"the dataset with the smallest weight would have {share}"
        msg = f"af.Data.mix(weights={name}): {reason}. Increase the weight, or leave it out."
        raise ArgumentError(msg)
    return Joined(sources), order


def _as_tuple(weights: Any) -> tuple[Any, ...]:
    """Return weights from a list, a tuple, a tensor or an array as a tuple."""
    if hasattr(weights, "tolist"):
        weights = weights.tolist()
    return tuple(weights) if isinstance(weights, (list, tuple)) else ()


@attrs.frozen
class Joined:
    """Several sources as one: each source's indices follow those of the previous source."""

    parts: "tuple[Source, ...]"

    @property
    def is_pure(self) -> bool:
        """Whether reading runs no user code."""
        return all(part.is_pure for part in self.parts)

    def __len__(self) -> int:
        """Return the number of samples in all sources."""
        return sum(len(part) for part in self.parts)

    def samples(self, indices: Indices, begin: Begin) -> list[Any]:
        """Return a list of samples, each from the source that has its index."""
        samples: list[Any] = [None] * len(indices)
        for number, places, inner in self._by_part(indices):
            part = self.parts[number]
            try:
                items = part.samples(inner, lambda i, at=places: begin(int(at[i])))
            # datasets may have the same class, so add the number
            except Exception as error:
                error.add_note(f"The sample is in dataset {number} of the mix.")
                raise
            for place, sample in zip(places.tolist(), items, strict=True):
                samples[place] = sample
        return samples

    def batch(self, indices: Indices, begin: Begin) -> Any:
        """Return a batch. If all sources are tensors, index them without a list of samples."""
        structures = {
            str(tree_structure(part.tensors)) if isinstance(part, Rows) else None
            for part in self.parts
        }
        if len(structures) > 1 or None in structures:
            samples = self.samples(indices, begin)
            return collate_samples(default_collate, samples, indices)
        pieces = [
            (torch.from_numpy(places), self.parts[number].batch(inner, begin))
            for number, places, inner in self._by_part(indices)
        ]
        turns = torch.cat([places for places, _ in pieces]).argsort()
        values = [value for _, value in pieces]
        leaves = zip(*map(tree.tree_leaves, values), strict=True)
        return tree.tree_map(
            lambda _: torch.cat(next(leaves)).index_select(0, turns), values[0]
        )

    def _by_part(self, indices: Indices) -> Iterator[tuple[int, Indices, Indices]]:
        """Yield, for each source with samples in a batch, a tuple of three values.

        The values are the source's number, the places of its samples in the batch, and the
        indices of these samples in the source.
        """
        ends = np.cumsum([len(part) for part in self.parts])
        numbers = np.searchsorted(ends, indices, side="right")
        for number in np.unique(numbers).tolist():
            places = np.flatnonzero(numbers == number)
            start = ends[number] - len(self.parts[number])
            yield number, places, indices[places] - start


Source: TypeAlias = Rows | Table | Items | Joined
"""Reads samples by index: `samples` returns a list, and `batch` a collated batch."""


@attrs.frozen
class Mixed:
    """An order that mixes joined datasets; each has its share of the positions.

    Positions are counted through all epochs. At the end of each block, the number of positions
    that each dataset has had is exact to one sample. No sample of a dataset is repeated before
    all samples of that dataset were used.

    Attributes:
        lengths: the lengths of the datasets.
        weights: the weight of each dataset.
        inner: the order of the samples within each dataset.
    """

    lengths: tuple[int, ...]
    weights: tuple[float, ...]
    inner: Order

    @property
    def name(self) -> str:
        """A name with the weights, and with the order within each dataset."""
        weights = ":".join(f"{weight:g}" for weight in self.weights)
        return f"mixed {weights}, {self.inner.name}"

    @cached_property
    def shares(self) -> tuple[int, ...]:
        """The weights as integers in exactly the same proportion."""
        ratios = [float(weight).as_integer_ratio() for weight in self.weights]
        common = max(below for _, below in ratios)  # all denominators are powers of two
        return tuple(above * (common // below) for above, below in ratios)

    @cached_property
    def block(self) -> int:
        """The number of positions in a block: 64 or more, so that each dataset has four."""
        return max(64, -(-4 * sum(self.shares) // min(self.shares)))

    def num_samples(self, n: int) -> int:
        """Return n, the number of samples in all datasets."""
        return n

    def count_used(self, blocks: int) -> list[int]:
        """Return how many positions each dataset has in the first blocks."""
        total, positions = sum(self.shares), self.block * blocks
        sums = accumulate(self.shares, initial=0)
        ends = [(2 * share * positions + total) // (2 * total) for share in sums]
        return [stop - start for start, stop in pairwise(ends)]

    def of_epoch(self, n: int, *, seed: int, epoch: int, **_: Any) -> AtPositions:
        """Return the order of an epoch, which is computed block by block."""
        offsets = np.cumsum([0, *self.lengths])

        @cache
        def own_order(dataset: int, turn: int) -> AtPositions:
            key, length = draws.key(seed, "mix", dataset), self.lengths[dataset]
            return self.inner.of_epoch(length, seed=key, epoch=turn, batch_size=None)

        def order_block(number: int) -> Indices:
            starts, stops = self.count_used(number), self.count_used(number + 1)
            counts = [stop - start for start, stop in zip(starts, stops, strict=True)]
            key = draws.key(seed, "mix", number)
            places = shuffle_positions(np.arange(self.block), n=self.block, key=key)
            datasets = np.repeat(np.arange(len(counts)), counts)[places]
            result = np.empty(self.block, np.int64)
            for dataset, start in enumerate(starts):
                places = np.flatnonzero(datasets == dataset)
                numbers = start + np.arange(len(places))
                turns, rows = divmod(numbers, self.lengths[dataset])
                for turn in np.unique(turns).tolist():
                    mask = turns == turn
                    indices = own_order(dataset, turn)(rows[mask])
                    result[places[mask]] = indices + offsets[dataset]
            return result

        first = epoch * n
        return lambda at: look_up_blocks(at + first, self.block, order_block)


def is_stream(dataset: Any) -> bool:
    """Return whether a dataset is a stream: it can be iterated over, and has no index."""
    if isinstance(dataset, IterableDataset):
        return True
    return hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__")
