# SPDX-License-Identifier: Apache-2.0
"""Tensors mapped from safetensors files: no memory but the pages that were read."""

import mmap
from collections.abc import Mapping

import attrs
import torch

from accelfn.checkpoint import disk
from accelfn.weights.shards import Shards


@attrs.frozen(eq=False)
class Mapped:
    """A tensor in a file.

    Attributes:
        tensor: its values, of which the system reads a page when it is looked at.
        file: the mapping.
        begin: its first byte in the file.
        end: the byte behind them.
    """

    tensor: torch.Tensor
    file: mmap.mmap
    begin: int
    end: int

    def drop(self) -> None:
        """Let the pages go that hold nothing else; they are read again when needed."""
        first = -(-self.begin // mmap.PAGESIZE) * mmap.PAGESIZE
        last = self.end // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first:
            self.file.madvise(mmap.MADV_DONTNEED, first, last - first)


def mapped(shards: Shards) -> Mapping[str, Mapped]:
    """Return the tensors of files, by name; nothing is read."""
    opened: dict[object, mmap.mmap] = {}
    found: dict[str, Mapped] = {}
    for name, meta in shards.tensors().items():
        path = shards.places[name]
        entry = shards.tables[path].tensors[name]
        if path not in opened:
            with disk.open_plain(path) as stream:
                # a private mapping: what is written into it never goes to the file
                opened[path] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
        file = opened[path]
        values = torch.empty(meta.shape, dtype=meta.dtype)
        if meta.numel():
            flat = torch.frombuffer(
                file, dtype=meta.dtype, count=meta.numel(), offset=entry.begin
            )
            values = flat.view(meta.shape)
        found[name] = Mapped(values, file, entry.begin, entry.end)
    return found
