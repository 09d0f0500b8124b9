# SPDX-License-Identifier: Apache-2.0
"""Fragments of a model: runs of parameters of about one size, each exchanged in its turn."""

from collections.abc import Collection, Iterator, Mapping
from itertools import accumulate

import attrs
import torch

from accelfn.base.shards import cut_axes, local

_MIB = 1 << 20


@attrs.frozen
class Timetable:
    """When each of some fragments is sent, and when what comes of it is used.

    Attributes:
        fragments: how many there are.
        sync_every: updates between two exchanges of a fragment.
        delay: updates between an exchange and its use.
    """

    fragments: int
    sync_every: int
    delay: int

    def leaving(self, updates: int) -> Iterator[int]:
        """Yield the fragments that are sent after so many updates."""
        for i in range(self.fragments):
            if updates and (updates - self._first(i)) % self.sync_every == 0:
                yield i

    def due(self, updates: int, sent: int) -> bool:
        """Whether what was sent after so many updates is used now."""
        return updates - sent == self.delay

    def half_way(self, updates: int, sent: int) -> bool:
        """Whether it has come so far that its second half begins."""
        return updates - sent == -(-self.delay // 2)

    def _first(self, i: int) -> int:
        return i * self.sync_every // self.fragments


def cut(sizes: Mapping[str, int], count: int) -> list[list[str]]:
    """Cut parameters, given by their sizes, into so many runs; some may be empty."""
    whole = max(1, sum(sizes.values()))
    ends = accumulate(sizes.values())
    # by its middle, so that one large parameter does not take its neighbours with it
    middles = (end - size / 2 for end, size in zip(ends, sizes.values(), strict=True))
    names: list[list[str]] = [[] for _ in range(count)]
    for name, middle in zip(sizes, middles, strict=True):
        names[min(count - 1, int(middle * count / whole))].append(name)
    return names


def together(
    names: Collection[str], params: Mapping[str, torch.Tensor], most: float
) -> Iterator[list[str]]:
    """Yield names of parameters in order, as many at once as have so many MiB, or one.

    Those at once are cut along the same axes: numbers that several ranks of a copy hold must
    not be rounded beside others, or they would drift.
    """
    bucket: list[str] = []
    size, axes = 0, None
    for name in names:
        part = local(params[name])
        more, cut = part.numel() * part.element_size(), cut_axes(params[name])
        if bucket and (size + more > most * _MIB or cut != axes):
            yield bucket
            bucket, size = [], 0
        bucket.append(name)
        size, axes = size + more, cut
    if bucket:
        yield bucket
