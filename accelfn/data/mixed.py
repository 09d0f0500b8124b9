# SPDX-License-Identifier: Apache-2.0
"""Several datasets as one, of which each has its share of an epoch's positions."""

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import attrs
import numpy as np
import torch
from torch.utils._pytree import tree_structure
from torch.utils.data import default_collate

from accelfn.base import draws, tree
from accelfn.base.arguments import is_number
from accelfn.data.orders.order import AtPositions, Order, Sequential, Shuffled
from accelfn.data.permutation import Indices, shuffled
from accelfn.data.sources import Begin, Rows, Source, collated, source_of, within
from accelfn.errors import ArgumentError, DataError

_LARGEST_BLOCK = 1 << 24
"""Positions that are shared out at once, in 128 MiB."""


def mixed(datasets: Any, *, weights: Any, shuffle: bool) -> tuple["Joined", "Mixed"]:
    """Return several datasets as one, and the order that gives each its share.

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
    shares = lengths if weights is None else _listed(weights)
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


def _listed(weights: Any) -> tuple[Any, ...]:
    """Return weights as a tuple, those of a tensor or an array too."""
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
            return collated(default_collate, self.samples(indices, begin), indices)
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
            turns = shuffled(np.arange(self.block), n=self.block, key=key)
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
