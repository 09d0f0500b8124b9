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
from typing import Any, Protocol, TypeAlias, cast

import attrs
import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import (
    IterableDataset,
    StackDataset,
    Subset,
    TensorDataset,
    default_collate,
)

from accelfn.base import tree
from accelfn.data.length import promised_length
from accelfn.data.permutation import Indices
from accelfn.errors import DataError

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
            return _fetched(fetch_all, type(dataset).__name__, within)
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
        return collated(default_collate, self.samples(indices, begin), indices)


def _fetched(
    fetch_all: Callable[[list[int]], Iterable[Any]], kind: str, wanted: list[int]
) -> list[Any]:
    """Return what a dataset's `__getitems__` gives, if it is as many as were asked for."""
    try:
        found = list(fetch_all(wanted))
    except Exception as error:
        error.add_note(f"This was raised by {kind}.__getitems__({shown(wanted)}).")
        raise
    if len(found) != len(wanted):
        msg = (
            f"{kind}.__getitems__({shown(wanted)}) gave {len(found)} samples; expected a"
            f" list of {len(wanted)}, one for each index."
        )
        raise DataError(msg)
    return found


def collated(
    collate: Callable[[list[Any]], Any], samples: list[Any], indices: Indices
) -> Any:
    """Return samples as a batch; an error says which they are."""
    try:
        return collate(samples)
    except Exception as error:
        error.add_note(
            "This was raised as a batch was made of the samples at dataset indices"
            f" {shown(indices)}."
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


def shown(indices: Sequence[int] | Indices) -> str:
    """Return the first few of some indices, as text."""
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
