# SPDX-License-Identifier: Apache-2.0
"""Sources: what samples are read from, by their index.

A dataset made of tensors is gathered by one indexing call a tensor, which is some ten times
the speed of fetching and stacking sample by sample; so is a table of Arrow. Any other
map-style dataset is asked through `__getitems__` where it has one, else item by item.
"""

import warnings
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from itertools import accumulate, pairwise
from typing import Any, Protocol, TypeAlias, cast

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
    promised_length,
    shuffle_positions,
)
from accelfn.errors import ArgumentError, DataError

Begin: TypeAlias = Callable[[int], object]
"""Called before a sample is read, with its place in the micro-batch."""


class Source(Protocol):
    """Samples by index."""

    @property
    def is_pure(self) -> bool:
        """Whether reading runs no code of the user's, so that nothing is drawn."""
        ...

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def samples(self, indices: Indices, begin: Begin) -> list[Any]:
        """Return the samples at these indices, calling `begin` as each is read."""
        ...

    def batch(self, indices: Indices, begin: Begin) -> Any:
        """Return those samples as one batch, as torch's collate makes it."""
        ...


@attrs.frozen
class Rows:
    """A dataset made of tensors: a tree of them, and which of their rows are samples."""

    tensors: Any
    picked: torch.Tensor | None = None
    is_pure: bool = attrs.field(default=True, init=False)

    @cached_property
    def columns(self) -> tuple[torch.Tensor, ...] | None:
        """The tensors, where they are a plain tuple: no batch then walks a tree."""
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
        picked = torch.as_tensor(indices, dtype=torch.int64)
        wrong = picked[(picked < -len(self)) | (picked >= len(self))]
        if len(wrong):
            msg = f"A Subset picks sample {int(wrong[0])} of a dataset that has {len(self)}."
            raise DataError(msg)
        picked = torch.where(picked < 0, picked + len(self), picked)
        return Rows(
            self.tensors, picked if self.picked is None else self.picked[picked]
        )

    def samples(self, indices: Indices, begin: Begin) -> list[Any]:
        """Return rows one by one; a collate of the user's may draw behind them."""
        begin(0)
        rows = self._rows(indices).tolist()
        return [tree.tree_map(partial(_at, row), self.tensors) for row in rows]

    def batch(self, indices: Indices, begin: Begin) -> Any:
        """Return the rows at these indices, as tensors of their own."""
        where, columns = self._rows(indices), self.columns
        if columns is not None:
            return tuple([column.index_select(0, where) for column in columns])
        return tree.tree_map(lambda leaf: leaf.index_select(0, where), self.tensors)

    def _rows(self, indices: Indices) -> torch.Tensor:
        where = torch.from_numpy(indices)  # pyright: ignore[reportUnknownMemberType]
        return where if self.picked is None else self.picked[where]


@attrs.frozen
class Table:
    """An Arrow table, known by its `take`, `column_names` and `num_rows`.

    A sample is a dict by column. A batch has tensors of the columns of numbers, and lists
    of the others.
    """

    table: Any
    is_pure: bool = attrs.field(default=True, init=False)

    def __len__(self) -> int:
        """Return the number of rows."""
        return self.table.num_rows

    def samples(self, indices: Indices, begin: Begin) -> list[Any]:
        """Return rows as dicts of Python values, behind which a collate may draw."""
        begin(0)
        return self.table.take(indices).to_pylist()

    def batch(self, indices: Indices, begin: Begin) -> Any:
        """Return columns."""
        taken = self.table.take(indices)
        return {name: self._column(taken, name) for name in taken.column_names}

    def _column(self, taken: Any, name: str) -> Any:
        column = taken.column(name)
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
        unordered = isinstance(self.dataset, (IterableDataset, Mapping))
        if unordered or not hasattr(self.dataset, "__getitem__"):
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
        """Return items; one that cannot be read is named in the error."""
        dataset, within = self.dataset, indices.tolist()
        while type(dataset) is Subset:  # its __getitems__ hides the samples, as Stack's
            within = [int(dataset.indices[i]) for i in within]
            dataset = cast("Any", dataset).dataset
        fetch_all = _fetching_all(dataset)
        if fetch_all is not None:
            begin(0)
            return _fetch_items(fetch_all, type(dataset).__name__, within)
        items: list[Any] = []
        for place, index in enumerate(within):
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
    fetch_all: Callable[[list[int]], Iterable[Any]], kind: str, wanted: list[int]
) -> list[Any]:
    """Fetch items by a dataset's `__getitems__`, and check their number."""
    try:
        found = list(fetch_all(wanted))
    except Exception as error:
        error.add_note(
            f"This was raised by {kind}.__getitems__({format_indices(wanted)})."
        )
        raise
    if len(found) != len(wanted):
        msg = (
            f"{kind}.__getitems__({format_indices(wanted)}) gave {len(found)} samples; expected a"
            f" list of {len(wanted)}, one for each index."
        )
        raise DataError(msg)
    return found


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


@contextmanager
def within(which: str) -> Generator[None]:
    """Let an error say of which of several datasets it is: they may be of one class."""
    try:
        yield
    except Exception as error:
        error.add_note(f"That is {which}.")
        raise


def format_indices(indices: Sequence[int] | Indices) -> str:
    """Format the first few indices as text."""
    listed = [str(each) for each in indices[:8]]
    return f"[{', '.join([*listed, *(['...'] if len(indices) > 8 else [])])}]"


def _at(row: int, leaf: torch.Tensor) -> torch.Tensor:
    return leaf[row]


def source_of(dataset: Any) -> Source:
    """Return how a map-style dataset is read best.

    Raises:
        DataError: it is read by the names of columns.
    """
    if hasattr(dataset, "iloc"):
        msg = (
            f"af.Data({type(dataset).__name__}): a pandas table is read by names, and not by"
            " numbers of rows. Give its columns as tensors, {name:"
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


def _fetching_all(dataset: Any) -> Callable[[list[int]], Any] | None:
    """Return what fetches many items at once, if it is the dataset's own.

    A subclass with an `__getitem__` alone, or one that hands on attributes, has that of
    another class, which knows nothing of it; torch's DataLoader reads past such a one.
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
    """Return the dataset as rows of tensors; None where it is not made of tensors.

    A subclass of TensorDataset or Subset may change what an item is, and is asked for them.

    Raises:
        DataError: its tensors differ in how many rows they have.
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
    """Return an array of numbers as a tensor over the same memory, if it can be one.

    Raises:
        DataError: torch has no such numbers, or some are masked.
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


# Several datasets as one, of which each has its share of an epoch's positions.


_LARGEST_BLOCK = 1 << 24
"""Positions that are shared out at once, in 128 MiB."""


def mix_datasets(
    datasets: Any, *, weights: Any, shuffle: bool
) -> tuple["Joined", "Mixed"]:
    """Join several datasets, and return the order that mixes them by weight.

    Raises:
        ArgumentError: these are no datasets, or no weights.
        DataError: one is empty.
    """
    if not isinstance(datasets, Sequence):
        msg = f"af.Data.mix({datasets!r}): expected a list of datasets."
        raise ArgumentError(msg)
    sources = tuple(source_of(each) for each in datasets)
    lengths = tuple(len(each) for each in sources)
    if not sources or not all(lengths):
        msg = f"af.Data.mix: expected datasets with samples, got lengths {lengths}."
        raise DataError(msg)
    shares = lengths if weights is None else _as_tuple(weights)
    fits = len(shares) == len(sources) and all(
        is_number(each) and 0 < each < float("inf") for each in shares
    )
    if not fits:
        msg = (
            f"af.Data.mix(weights={weights!r}): expected {len(sources)} finite numbers"
            " above 0."
        )
        raise ArgumentError(msg)
    inner = Shuffled() if shuffle else Sequential()
    order = Mixed(lengths, shares, inner)
    if order.block > _LARGEST_BLOCK:
        of_whom = "the datasets' lengths" if weights is None else f"{weights!r}"
        msg = (
            f"af.Data.mix(weights={of_whom}): the least would come less than once in"
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
    """Sources that lie one after the other, as one."""

    parts: tuple[Source, ...]

    @property
    def is_pure(self) -> bool:
        """Whether reading runs no code of the user's."""
        return all(part.is_pure for part in self.parts)

    def __len__(self) -> int:
        """Return the number of samples of all."""
        return sum(len(part) for part in self.parts)

    def samples(self, indices: Indices, begin: Begin) -> list[Any]:
        """Return the samples, each of its own part."""
        found: list[Any] = [None] * len(indices)
        for number, here, own in self._by_part(indices):
            part = self.parts[number]
            with within(f"dataset {number} of the mix"):
                samples = part.samples(own, lambda i, here=here: begin(int(here[i])))
            for place, sample in zip(here.tolist(), samples, strict=True):
                found[place] = sample
        return found

    def batch(self, indices: Indices, begin: Begin) -> Any:
        """Return the samples as one batch; of parts made of tensors without a list."""
        if not _are_alike(self.parts):
            return collate_samples(
                default_collate, self.samples(indices, begin), indices
            )
        pieces = [
            (torch.from_numpy(here), self.parts[number].batch(own, begin))
            for number, here, own in self._by_part(indices)
        ]
        places = torch.cat([here for here, _ in pieces]).argsort()
        return tree.tree_map_all(
            lambda *leaves: torch.cat(leaves).index_select(0, places),
            *[values for _, values in pieces],
        )

    def _by_part(self, indices: Indices) -> list[tuple[int, Indices, Indices]]:
        """Return parts' numbers with the places that each fills, and its own indices of them."""
        ends = np.cumsum([len(part) for part in self.parts])
        which = np.searchsorted(ends, indices, side="right")
        return [
            (
                number,
                (here := np.flatnonzero(which == number)),
                indices[here] - (ends[number] - len(self.parts[number])),
            )
            for number in np.unique(which).tolist()
        ]


def _are_alike(parts: Sequence[Source]) -> bool:
    """Whether all are made of tensors, in the same containers."""
    shapes = {
        str(tree_structure(part.tensors)) if isinstance(part, Rows) else None
        for part in parts
    }
    return len(shapes) == 1 and None not in shapes


@attrs.frozen
class Mixed:
    """Positions shared out among several datasets that lie one after the other.

    Positions are counted through all epochs. At the end of every block each dataset has
    had its exact share, to within one sample; it goes through its samples epoch after epoch
    of its own, so none comes again before all have come.

    Attributes:
        lengths: of the datasets.
        weights: in which proportion each has its share of the positions.
        inner: the order of a dataset's own samples.
    """

    lengths: tuple[int, ...]
    weights: tuple[float, ...]
    inner: Order

    @property
    def name(self) -> str:
        """What is mixed, and in which proportion."""
        weights = ":".join(f"{weight:g}" for weight in self.weights)
        return f"mixed {weights}, {self.inner.name}"

    @cached_property
    def shares(self) -> tuple[int, ...]:
        """The weights as integers of the very same proportion."""
        ratios = [float(weight).as_integer_ratio() for weight in self.weights]
        whole = max(below for _, below in ratios)  # powers of two
        return tuple(above * (whole // below) for above, below in ratios)

    @cached_property
    def block(self) -> int:
        """How many positions are shared out at once; at least four to the least share."""
        return max(64, -(-4 * sum(self.shares) // min(self.shares)))

    def num_samples(self, n: int) -> int:
        """Take as many as there are in all."""
        return n

    def used(self, blocks: int) -> list[int]:
        """Return how many samples of each dataset came in the first blocks."""
        whole, positions = sum(self.shares), self.block * blocks
        sums = accumulate(self.shares, initial=0)
        ends = [(2 * each * positions + whole) // (2 * whole) for each in sums]
        return [stop - start for start, stop in pairwise(ends)]

    def of_epoch(self, n: int, *, seed: int, epoch: int, **_: Any) -> AtPositions:
        """Return an epoch's order, computed a block at a time."""
        offsets = np.cumsum([0, *self.lengths])
        inner: dict[tuple[int, int], AtPositions] = {}

        def own_order(which: int, turn: int) -> AtPositions:
            found = inner.get((which, turn))
            if found is None:
                key = draws.key(seed, "mix", which)
                length = self.lengths[which]
                found = inner[which, turn] = self.inner.of_epoch(
                    length, seed=key, epoch=turn, batch_size=None
                )
            return found

        def of_block(number: int) -> Indices:
            before, after = self.used(number), self.used(number + 1)
            counts = [stop - start for start, stop in zip(before, after, strict=True)]
            key = draws.key(seed, "mix", number)
            turns = shuffle_positions(np.arange(self.block), n=self.block, key=key)
            whose = np.repeat(np.arange(len(counts)), counts)[turns]
            result = np.empty(self.block, np.int64)
            for which, start in enumerate(before):
                places = np.flatnonzero(whose == which)
                turns, within = divmod(
                    start + np.arange(len(places)), self.lengths[which]
                )
                for turn in np.unique(turns).tolist():
                    here = turns == turn
                    found = own_order(which, turn)(within[here])
                    result[places[here]] = found + offsets[which]
            return result

        def order(positions: Indices) -> Indices:
            through = positions + epoch * n
            numbers = through // self.block
            result = np.empty_like(positions)
            for number in np.unique(numbers).tolist():
                here = numbers == number
                result[here] = of_block(number)[through[here] - number * self.block]
            return result

        return order
