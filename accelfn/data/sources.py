# SPDX-License-Identifier: Apache-2.0
"""Sources of samples: read a dataset by index.

A dataset made of tensors, or an Arrow table, is gathered by one indexing call for each tensor,
which is about ten times faster than to fetch and stack samples. Any other map-style dataset is
read by `__getitems__` if it has this method, else item by item.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
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
"""Called before a sample is read, with its place in the micro-batch."""


@attrs.frozen
class Rows:
    """A dataset made of a tree of tensors: some of their rows, or all."""

    tensors: Any
    picked: torch.Tensor | None = None
    is_pure: bool = attrs.field(default=True, init=False)

    @cached_property
    def columns(self) -> tuple[torch.Tensor, ...] | None:
        """The tensors, if they are a plain tuple: then no batch walks a tree."""
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
        """Return the rows at these indices as a dataset; nothing is copied."""
        rows, count = torch.as_tensor(indices, dtype=torch.int64), len(self)
        outside = rows[(rows < -count) | (rows >= count)]
        if len(outside):
            msg = f"A Subset picks sample {int(outside[0])} of a dataset that has {count}."
            raise DataError(msg)
        rows = torch.where(rows < 0, rows + count, rows)
        return Rows(self.tensors, rows if self.picked is None else self.picked[rows])

    def samples(self, indices: Indices, begin: Begin) -> list[Any]:
        """Return rows one by one; the user's collate may draw random numbers after them."""
        begin(0)
        rows = self._rows(indices).tolist()
        return [tree.tree_map(itemgetter(row), self.tensors) for row in rows]

    def batch(self, indices: Indices, begin: Begin) -> Any:
        """Return copies of the rows at these indices."""
        rows, columns = self._rows(indices), self.columns
        if columns is not None:
            return tuple([column.index_select(0, rows) for column in columns])
        return tree.tree_map(lambda leaf: leaf.index_select(0, rows), self.tensors)

    def _rows(self, indices: Indices) -> torch.Tensor:
        rows = torch.from_numpy(indices)  # pyright: ignore[reportUnknownMemberType]
        return rows if self.picked is None else self.picked[rows]


@attrs.frozen
class Table:
    """An Arrow table, recognized by its `take`, `column_names` and `num_rows`.

    A sample is a dict by column. A batch has tensors of number columns, and lists of other
    columns.
    """

    table: Any
    is_pure: bool = attrs.field(default=True, init=False)

    def __len__(self) -> int:
        """Return the number of rows."""
        return self.table.num_rows

    def samples(self, indices: Indices, begin: Begin) -> list[Any]:
        """Return rows as dicts of Python values; collate may draw random numbers after them."""
        begin(0)
        return self.table.take(indices).to_pylist()

    def batch(self, indices: Indices, begin: Begin) -> Any:
        """Return columns."""
        rows = self.table.take(indices)
        return {name: self._column(rows, name) for name in rows.column_names}

    def _column(self, rows: Any, name: str) -> Any:
        column = rows.column(name)
        if column.null_count:
            msg = (
                f"Column {name!r} of the table has a null among these rows; fill it, or give"
                " af.Data(collate=...), which gets rows as dicts."
            )
            raise DataError(msg)
        values = column.to_numpy()
        if values.dtype.kind in "biuf":
            return torch.from_numpy(values.copy())
        try:
            return default_collate(column.to_pylist())
        except Exception as error:
            error.add_note(
                f"This was raised as a batch was made of column {name!r} of the table."
            )
            raise


@attrs.frozen
class Items:
    """Any other map-style dataset."""

    dataset: Any
    is_pure: bool = attrs.field(default=False, init=False)

    def __len__(self) -> int:
        """Return the number of samples.

        Raises:
            DataError: the dataset does not know it, or cannot be read by index.
        """
        kind = type(self.dataset).__name__
        if isinstance(self.dataset, Mapping) and not self.dataset:
            return 0
        has_no_index = isinstance(self.dataset, (IterableDataset, Mapping))
        if has_no_index or not hasattr(self.dataset, "__getitem__"):
            msg = (
                f"af.Data: {kind} cannot be read by index; expected a dataset with __len__"
                " and __getitem__."
            )
            raise DataError(msg)
        length = promised_length(self.dataset)
        if length is None:
            msg = f"af.Data: {kind} has no length; expected a dataset with __len__."
            raise DataError(msg)
        return length

    def samples(self, indices: Indices, begin: Begin) -> list[Any]:
        """Return items; the error for a failed item names it."""
        dataset, inner = self.dataset, indices.tolist()
        while type(dataset) is Subset:  # its __getitems__ hides the samples, as Stack's
            inner = [int(dataset.indices[i]) for i in inner]
            dataset = cast("Any", dataset).dataset
        fetch_all = _own_getitems(dataset)
        if fetch_all is not None:
            begin(0)
            return _fetch_items(fetch_all, type(dataset).__name__, inner)
        items: list[Any] = []
        for place, index in enumerate(inner):
            begin(place)
            try:
                items.append(dataset[index])
            except Exception as error:
                error.add_note(
                    f"This was raised by {type(dataset).__name__}[{index}]: the sample at"
                    f" dataset index {indices[place]}."
                )
                raise
        return items

    def batch(self, indices: Indices, begin: Begin) -> Any:
        """Return items, collated."""
        return collate_samples(default_collate, self.samples(indices, begin), indices)


def _fetch_items(
    fetch_all: Callable[[list[int]], Iterable[Any]], kind: str, indices: list[int]
) -> list[Any]:
    """Fetch items by a dataset's `__getitems__`, and check their number."""
    call = f"{kind}.__getitems__({format_indices(indices)})"
    try:
        items = list(fetch_all(indices))
    except Exception as error:
        error.add_note(f"This was raised by {call}.")
        raise
    if len(items) != len(indices):
        msg = (
            f"{call} gave {len(items)} samples; expected a list of {len(indices)}, one for"
            " each index."
        )
        raise DataError(msg)
    return items


def collate_samples(
    collate: Callable[[list[Any]], Any], samples: list[Any], indices: Indices
) -> Any:
    """Collate samples into a batch; errors name the samples."""
    try:
        return collate(samples)
    except Exception as error:
        error.add_note(
            "This was raised as a batch was made of the samples at dataset indices"
            f" {format_indices(indices)}."
        )
        raise


def format_indices(indices: Sequence[int] | Indices) -> str:
    """Format the first few indices as text."""
    first = ", ".join(str(index) for index in indices[:8])
    return f"[{first}{', ...' if len(indices) > 8 else ''}]"


def source_of(dataset: Any) -> "Source":
    """Return the fastest source for a map-style dataset.

    Raises:
        DataError: the dataset is read by the names of columns.
    """
    if hasattr(dataset, "iloc"):
        msg = (
            f"af.Data({type(dataset).__name__}): a pandas table is read by names, not by row"
            " numbers. Give its columns as tensors, {name:"
            " torch.tensor(table[name].to_numpy()) for name in table}, or a Dataset."
        )
        raise DataError(msg)
    rows = rows_of(dataset)
    if rows is not None:
        return rows
    marks = ("take", "column_names", "num_rows", "to_pylist")
    if all(hasattr(dataset, mark) for mark in marks):
        return Table(dataset)
    return Items(dataset)


def _own_getitems(dataset: Any) -> Callable[[list[int]], Any] | None:
    """Return a dataset's `__getitems__`, unless it belongs to another class.

    A subclass with only a `__getitem__`, or a wrapper that forwards attributes, has the
    `__getitems__` of another class, which would bypass it, as it does in torch's DataLoader.
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
    """Return the dataset as rows of tensors; None if it is not made of tensors.

    A subclass of TensorDataset or Subset may change its items, so it is read item by item.

    Raises:
        DataError: its tensors have different numbers of rows.
    """
    if type(dataset) is Subset:
        inner = rows_of(dataset.dataset)
        return None if inner is None else inner.subset(dataset.indices)
    columns = tuple(dataset.tensors) if type(dataset) is TensorDataset else dataset
    if not isinstance(columns, (torch.Tensor, np.ndarray, tuple, Mapping)):
        return None
    tensors = tree.tree_map(_as_tensor, cast("Any", columns))
    leaves = tree.tree_leaves(tensors)
    if not leaves or not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
        return None
    lengths = {len(leaf) if leaf.ndim else -1 for leaf in leaves}
    if len(lengths) > 1 or -1 in lengths:
        shapes = [tuple(leaf.shape) for leaf in leaves]
        msg = (
            f"The dataset's tensors have shapes {shapes}; expected one number of rows"
            " in all."
        )
        raise DataError(msg)
    return Rows(tensors)


def _as_tensor(leaf: Any) -> Any:
    """Return an array of numbers as a tensor over the same memory, if possible.

    Raises:
        DataError: torch has no such dtype, or the array is masked.
    """
    if isinstance(leaf, torch.Tensor):
        return leaf.detach() if leaf.requires_grad else leaf
    if not isinstance(leaf, np.ndarray) or leaf.dtype.kind not in "biufc":
        return leaf
    array = cast("npt.NDArray[Any]", leaf)
    if isinstance(array, np.ma.MaskedArray):
        msg = "The dataset is a masked array; give its filled(...)."
        raise DataError(msg)
    if any(stride < 0 for stride in array.strides):
        array = np.ascontiguousarray(array)
    with warnings.catch_warnings():  # read-only memory is fine: rows are copied out
        warnings.simplefilter("ignore", UserWarning)
        try:
            return torch.from_numpy(array)
        except (TypeError, ValueError) as error:
            msg = (
                f"The dataset is an array of {array.dtype.str!r}, which torch does not have;"
                " give its astype(np.float32), or another dtype of torch's."
            )
            raise DataError(msg) from error


# Several datasets as one, each with its share of an epoch's positions.


_LARGEST_BLOCK = 1 << 24
"""Positions in a block, which take 128 MiB."""


def mix_datasets(
    datasets: Any, *, weights: Any, shuffle: bool
) -> tuple["Joined", "Mixed"]:
    """Join several datasets, and return the order that mixes them by weight.

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
        msg = f"af.Data.mix: expected datasets with samples, got lengths {lengths}."
        raise DataError(msg)
    shares = lengths if weights is None else _as_tuple(weights)
    are_valid = all(is_number(w) and 0 < w < float("inf") for w in shares)
    if len(shares) != len(sources) or not are_valid:
        msg = (
            f"af.Data.mix(weights={weights!r}): expected {len(sources)} finite numbers"
            " above 0."
        )
        raise ArgumentError(msg)
    order = Mixed(lengths, shares, Shuffled() if shuffle else Sequential())
    if order.block > _LARGEST_BLOCK:
        name = "the datasets' lengths" if weights is None else f"{weights!r}"
        msg = (
            f"af.Data.mix(weights={name}): the least would come less than once in"
            f" {_LARGEST_BLOCK // 4:,} samples. Give it a larger weight, or leave it out."
        )
        raise ArgumentError(msg)
    return Joined(sources), order


def _as_tuple(weights: Any) -> tuple[Any, ...]:
    """Convert weights to a tuple, also from a tensor or an array."""
    if hasattr(weights, "tolist"):
        weights = weights.tolist()
    return tuple(weights) if isinstance(weights, (list, tuple)) else ()


@attrs.frozen
class Joined:
    """Several sources, one after the other, as one source."""

    parts: "tuple[Source, ...]"

    @property
    def is_pure(self) -> bool:
        """Whether reading runs no code of the user's."""
        return all(part.is_pure for part in self.parts)

    def __len__(self) -> int:
        """Return the number of samples of all."""
        return sum(len(part) for part in self.parts)

    def samples(self, indices: Indices, begin: Begin) -> list[Any]:
        """Return the samples, each from its own part."""
        samples: list[Any] = [None] * len(indices)
        for number, places, inner in self._by_part(indices):

            def begin_part(i: int, places: Indices = places) -> None:
                begin(int(places[i]))

            try:
                items = self.parts[number].samples(inner, begin_part)
            except Exception as error:  # datasets may be of one class
                error.add_note(f"That is dataset {number} of the mix.")
                raise
            for place, sample in zip(places.tolist(), items, strict=True):
                samples[place] = sample
        return samples

    def batch(self, indices: Indices, begin: Begin) -> Any:
        """Return the samples as one batch, without a list if all parts are tensors."""
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
        return tree.tree_map_all(
            lambda *leaves: torch.cat(leaves).index_select(0, turns),
            *[values for _, values in pieces],
        )

    def _by_part(self, indices: Indices) -> Iterator[tuple[int, Indices, Indices]]:
        """Yield numbers of parts, their places in the batch, and their own indices."""
        ends = np.cumsum([len(part) for part in self.parts])
        numbers = np.searchsorted(ends, indices, side="right")
        for number in np.unique(numbers).tolist():
            places = np.flatnonzero(numbers == number)
            start = ends[number] - len(self.parts[number])
            yield number, places, indices[places] - start


Source: TypeAlias = Rows | Table | Items | Joined
"""Samples by index, with `samples` for a list and `batch` for one batch."""


@attrs.frozen
class Mixed:
    """An order of several joined datasets, each with its share of positions.

    Positions are counted through all epochs. At the end of every block each dataset has
    had its exact share, to within one sample. It goes through its samples epoch by epoch, so no
    sample comes again before all its samples have come.

    Attributes:
        lengths: the lengths of the datasets.
        weights: the weight of each dataset.
        inner: the order of a dataset's samples.
    """

    lengths: tuple[int, ...]
    weights: tuple[float, ...]
    inner: Order

    @property
    def name(self) -> str:
        """The weights, and the order of the samples."""
        weights = ":".join(f"{weight:g}" for weight in self.weights)
        return f"mixed {weights}, {self.inner.name}"

    @cached_property
    def shares(self) -> tuple[int, ...]:
        """The weights as integers in exactly the same proportion."""
        ratios = [float(weight).as_integer_ratio() for weight in self.weights]
        common = max(below for _, below in ratios)  # powers of two
        return tuple(above * (common // below) for above, below in ratios)

    @cached_property
    def block(self) -> int:
        """The number of positions in a block; at least four for the smallest share."""
        return max(64, -(-4 * sum(self.shares) // min(self.shares)))

    def num_samples(self, n: int) -> int:
        """Return the number of all samples."""
        return n

    def count_used(self, blocks: int) -> list[int]:
        """Return how many samples of each dataset came in the first blocks."""
        total, positions = sum(self.shares), self.block * blocks
        sums = accumulate(self.shares, initial=0)
        ends = [(2 * share * positions + total) // (2 * total) for share in sums]
        return [stop - start for start, stop in pairwise(ends)]

    def of_epoch(self, n: int, *, seed: int, epoch: int, **_: Any) -> AtPositions:
        """Return an epoch's order, computed a block at a time."""
        offsets = np.cumsum([0, *self.lengths])
        inner: dict[tuple[int, int], AtPositions] = {}

        def own_order(dataset: int, turn: int) -> AtPositions:
            if (dataset, turn) not in inner:
                key, length = draws.key(seed, "mix", dataset), self.lengths[dataset]
                inner[dataset, turn] = self.inner.of_epoch(
                    length, seed=key, epoch=turn, batch_size=None
                )
            return inner[dataset, turn]

        def order_block(number: int) -> Indices:
            starts, stops = self.count_used(number), self.count_used(number + 1)
            counts = [stop - start for start, stop in zip(starts, stops, strict=True)]
            key = draws.key(seed, "mix", number)
            places = shuffle_positions(np.arange(self.block), n=self.block, key=key)
            datasets = np.repeat(np.arange(len(counts)), counts)[places]
            result = np.empty(self.block, np.int64)
            for dataset, start in enumerate(starts):
                length, places = (
                    self.lengths[dataset],
                    np.flatnonzero(datasets == dataset),
                )
                turns, rows = divmod(start + np.arange(len(places)), length)
                for turn in np.unique(turns).tolist():
                    mask = turns == turn
                    indices = own_order(dataset, turn)(rows[mask])
                    result[places[mask]] = indices + offsets[dataset]
            return result

        return lambda positions: look_up_blocks(
            positions + epoch * n, self.block, order_block
        )


def is_stream(dataset: Any) -> bool:
    """Return whether a dataset can be iterated over, and has no index."""
    if isinstance(dataset, IterableDataset):
        return True
    return hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__")
