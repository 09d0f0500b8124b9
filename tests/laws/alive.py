# SPDX-License-Identifier: Apache-2.0
"""How many bytes of tensors that a thread made are alive at once."""

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Alive(TorchDispatchMode):
    """Counts the memory that operations make while it is entered, on this thread."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.dtype, self.most = dtype, 0
        self._made: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Call an operation, and count the memory of what it returns."""
        there = self._storages((args, kwargs))
        made = func(*args, **(kwargs or {}))
        self._made |= {
            ref: num_bytes
            for ref, num_bytes in self._storages(made).items()
            if ref not in there
        }
        self._made = {r: n for r, n in self._made.items() if not r.expired()}
        self.most = max(self.most, sum(self._made.values()))
        return made

    def _storages(self, values: Any) -> dict[StorageWeakRef, int]:
        storages = [
            each.untyped_storage()
            for each in tree_leaves(values)
            if isinstance(each, torch.Tensor)
            and type(each).__name__ != "DTensor"
            and not each.is_meta  # which has no memory
            and self.dtype in (None, each.dtype)
        ]
        return {StorageWeakRef(each): each.nbytes() for each in storages}
