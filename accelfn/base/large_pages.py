# SPDX-License-Identifier: Apache-2.0
"""Memory that is filled at once, in large pages where the system has them.

The system gives memory when it is first written to, a page at a time. A model of 500 MB takes
130,000 pages of 4 KiB, and giving them takes longer than reading its file; of 2 MiB it takes 260.
"""

import ctypes
import mmap
from collections.abc import Sequence

import torch

_LARGE = 1 << 21
"""Bytes of a large page, on most machines."""
_ADVICE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)
"""What Linux calls them; no other system takes such advice."""


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return memory of the host for a tensor whose values come from a file.

    Cost: that of `torch.empty`, and for a large tensor one call of the system. No page reaches
    beyond the tensor, so nobody's memory grows.
    """
    tensor = torch.empty(tuple(shape), dtype=dtype, device="cpu")
    if _ADVICE is not None and tensor.nbytes >= 2 * _LARGE:
        begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
        last = end // mmap.PAGESIZE * mmap.PAGESIZE
        # a system without large pages says no, and gives small ones
        ctypes.CDLL(None).madvise(
            ctypes.c_void_p(first), ctypes.c_size_t(last - first), _ADVICE
        )
    return tensor
