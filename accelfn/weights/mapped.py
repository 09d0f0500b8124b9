# SPDX-License-Identifier: Apache-2.0
"""Tensors mapped from safetensors files: no memory but the pages that were read."""

import math
import mmap
from collections.abc import Mapping
from pathlib import Path

import attrs
import torch

from accelfn.checkpoint import disk, files
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


@attrs.frozen(eq=False)
class Maps:
    """Files that are mapped, each when the first of its tensors is.

    Attributes:
        shards: where the tensors lie.
    """

    shards: Shards
    _opened: dict[Path, mmap.mmap] = attrs.field(factory=dict, init=False)

    def mapped(self, name: str) -> Mapped:
        """Return a tensor, of which nothing is read."""
        path = self.shards.places[name]
        entry = self.shards.tables[path].tensors[name]
        if path not in self._opened:
            with disk.open_plain(path) as stream:
                # a private mapping: what is written into it never goes to the file
                file = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
            self._opened[path] = file
        file, dtype = self._opened[path], files.DTYPES[entry.dtype]
        count = math.prod(entry.shape)
        if not count:  # torch would not begin behind the end
            values = torch.empty(entry.shape, dtype=dtype)
        else:
            flat = torch.frombuffer(file, dtype=dtype, count=count, offset=entry.begin)
            values = flat.view(entry.shape)
        return Mapped(values, file, entry.begin, entry.end)

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor, read where torch would have begun it at another place."""
        values = self.mapped(name).tensor
        return values if is_aligned(values) else self.shards.read(name)


def mapped(shards: Shards) -> Mapping[str, Mapped]:
    """Return the tensors of files, by name; nothing is read."""
    maps = Maps(shards)
    return {name: maps.mapped(name) for name in shards.places}


def is_aligned(tensor: torch.Tensor) -> bool:
    """Whether a tensor begins where torch lets one begin; a kernel may round otherwise else."""
    return tensor.data_ptr() % files.ALIGNED == 0
