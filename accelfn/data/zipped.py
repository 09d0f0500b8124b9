# SPDX-License-Identifier: Apache-2.0
"""Several datasets side by side, each in an order of its own."""

from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np

from accelfn.base import draws
from accelfn.data.orders.order import AtPositions, Order, Sequential, Shuffled
from accelfn.data.permutation import Indices
from accelfn.data.sources import Begin, Source, source_of, within
from accelfn.errors import DataError


def zipped(datasets: Mapping[str, Any], *, shuffle: bool) -> tuple["Zipped", "Side"]:
    """Return named datasets as one of dicts, and the order that has a column for each.

    Raises:
        DataError: there is none, or one is empty.
    """
    parts = {name: source_of(each) for name, each in datasets.items()}
    lengths = {name: len(each) for name, each in parts.items()}
    if not parts or not all(lengths.values()):
        msg = f"af.Data.zip: expected datasets with samples, got lengths {lengths}."
        raise DataError(msg)
    inner = Shuffled() if shuffle else Sequential()
    return Zipped(parts), Side(tuple(parts), tuple(lengths.values()), inner)


@attrs.frozen
class Zipped:
    """Sources side by side; an index is a row with one for each."""

    parts: Mapping[str, Source]

    @property
    def is_pure(self) -> bool:
        """Whether reading runs no code of the user's."""
        return all(part.is_pure for part in self.parts.values())

    def __len__(self) -> int:
        """Return the number of samples of the longest."""
        return max(len(part) for part in self.parts.values())

    def samples(self, indices: Indices, begin: Begin) -> list[Any]:
        """Return dicts with a sample of each."""
        columns = list[list[Any]]()
        for i, (name, part) in enumerate(self.parts.items()):
            with within(f"dataset {name!r} of the zip"):
                own = np.ascontiguousarray(indices[:, i])
                columns.append(part.samples(own, _of_part(begin, i)))
        return [
            dict(zip(self.parts, row, strict=True))
            for row in zip(*columns, strict=True)
        ]

    def batch(self, indices: Indices, begin: Begin) -> Any:
        """Return a dict with a batch of each."""
        batches = dict[str, Any]()
        for i, (name, part) in enumerate(self.parts.items()):
            with within(f"dataset {name!r} of the zip"):
                own = np.ascontiguousarray(indices[:, i])
                batches[name] = part.batch(own, _of_part(begin, i))
        return batches


def _of_part(begin: Begin, number: int) -> Begin:
    """Let datasets side by side draw other numbers than one another."""
    return lambda place, _=0: begin(place, number)


@attrs.frozen
class Side:
    """Datasets side by side: a column of indices for each, in an order of its own.

    An epoch is as long as the longest; the others begin again, in the order of their next
    epoch.
    """

    names: tuple[str, ...]
    lengths: tuple[int, ...]
    inner: Order

    @property
    def name(self) -> str:
        """What is zipped."""
        return f"zipped {', '.join(self.names)}, {self.inner.name}"

    def in_order(self) -> "Side":
        """Return them with each in its dataset's own order."""
        return attrs.evolve(self, inner=Sequential())

    def num_samples(self, n: int) -> int:
        """Take the longest once."""
        return n

    def of_epoch(self, n: int, *, seed: int, epoch: int, **_: Any) -> AtPositions:
        """Return an epoch's order; its result has a column for each dataset."""

        def column(which: int, through: Indices) -> Indices:
            length = self.lengths[which]
            key = draws.key(seed, "zip", self.names[which])
            turns, places = divmod(through, length)
            found = np.empty_like(places)
            for turn in np.unique(turns).tolist():
                here = turns == turn
                order = self.inner.of_epoch(
                    length, seed=key, epoch=turn, batch_size=None
                )
                found[here] = order(places[here])
            return found

        def order(positions: Indices) -> Indices:
            through = positions + epoch * n
            columns = [column(which, through) for which in range(len(self.lengths))]
            return np.stack(columns, axis=1)

        return order
