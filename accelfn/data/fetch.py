# SPDX-License-Identifier: Apache-2.0
"""From dataset indices to a batch, in one call a micro-batch.

A dataset made of tensors is gathered by one indexing call a tensor, which is some ten times
the speed of fetching and stacking sample by sample. Any other map-style dataset is asked through
`__getitems__` where it has one, else item by item, and collated.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, cast

import attrs
import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Subset, TensorDataset, default_collate

from accelfn import streams, tree
from accelfn.data.order import Indices
from accelfn.errors import DataError

Collate: TypeAlias = Callable[[list[Any]], Any]


_CPU = torch.device("cpu")


@attrs.frozen
class Rows:
    """A dataset made of tensors: a tree of them, and which of their rows are samples."""

    tensors: Any
    picked: torch.Tensor | None = None

    def __len__(self) -> int:
        """Return the number of samples."""
        if self.picked is not None:
            return len(self.picked)
        return len(tree.tensor_leaves(self.tensors)[0])

    def __getitem__(self, index: int) -> Any:
        """Return one sample."""
        row = index if self.picked is None else int(self.picked[index])
        return tree.tree_map(lambda leaf: leaf[row], self.tensors)

    def subset(self, indices: Sequence[int]) -> "Rows":
        """Return the rows at these indices as a dataset; nothing is copied."""
        picked = torch.as_tensor(indices, dtype=torch.int64)
        return Rows(
            self.tensors, picked if self.picked is None else self.picked[picked]
        )

    def gather(self, indices: Indices) -> Any:
        """Return the rows at these indices, as tensors of their own."""
        where = torch.from_numpy(indices)  # pyright: ignore[reportUnknownMemberType]
        if self.picked is not None:
            where = self.picked[where]
        if isinstance(self.tensors, tuple):  # the common case, without the tree walk
            leaves = cast("tuple[Any, ...]", self.tensors)
            if type(leaves) is tuple and all(type(t) is torch.Tensor for t in leaves):
                return tuple(t.index_select(0, where) for t in leaves)
        return tree.tree_map(lambda leaf: leaf.index_select(0, where), self.tensors)


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
    """Return an array of numbers as a tensor over the same memory, if it can be one."""
    if not isinstance(leaf, np.ndarray) or leaf.dtype.kind not in "biufc":
        return leaf
    array = cast("npt.NDArray[Any]", leaf)
    if any(stride < 0 for stride in array.strides):
        array = np.ascontiguousarray(array)
    with warnings.catch_warnings():  # read-only memory is fine: rows are copied out
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(array)


@attrs.frozen
class Fetch:
    """Read and collate samples; what a worker process is given.

    What a dataset draws from torch's default generator (augmentation) comes from `(key,
    index)`, so it does not depend on workers, ranks or micro-batches. A `__getitems__` of the
    dataset's own draws for all its samples at once: there it comes from the first index.
    """

    dataset: Any
    collate: Collate | None
    key: int

    def __call__(self, indices: Indices) -> Any:
        """Return the collated samples at these dataset indices."""
        if isinstance(self.dataset, Rows) and self.collate is None:
            return self.dataset.gather(indices)
        collate = default_collate if self.collate is None else self.collate
        return collate(self._items(indices.tolist()))

    def _items(self, indices: list[int]) -> list[Any]:
        dataset, within = self.dataset, indices
        while type(dataset) is Subset:  # its __getitems__ would hide the samples
            within = [int(dataset.indices[i]) for i in within]
            dataset = cast("Any", dataset).dataset
        fetch_all = getattr(dataset, "__getitems__", None)
        with streams.stream(streams.fold(self.key, indices[0]), _CPU):
            if callable(fetch_all):
                return list(cast("Any", fetch_all(within)))
            items: list[Any] = []
            for index, place in zip(indices, within, strict=True):
                torch.default_generator.manual_seed(streams.fold(self.key, index))
                items.append(dataset[place])
        return items
