# SPDX-License-Identifier: Apache-2.0
"""How much memory of the fake accelerator each simulated rank has, and had at most."""

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Tensor(ctypes.Structure):
    """A DLManagedTensor: where its memory is, on which device, and what lets go of it."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32),
        ("index", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


class Meter:
    """Counts the bytes that each thread, which is a simulated rank, has of the device.

    Attributes:
        peaks: the most that each had at a time.
    """

    def __init__(self) -> None:
        self.peaks: dict[int, int] = {}
        self._have: dict[int, int] = {}
        self._kept: dict[int, tuple[int, int, int, Any]] = {}
        self._away: set[int] = set()
        self._call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._let_go)

    def take(self, head: Tensor, tensor: torch.Tensor) -> None:
        """Count a tensor's memory until nothing has it any more."""
        owner, size = threading.get_ident(), tensor.untyped_storage().nbytes()
        let_go = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(head.deleter)
        self._kept[ctypes.addressof(head)] = owner, head.data, size, let_go
        head.deleter = ctypes.cast(self._call, ctypes.c_void_p).value
        self._add(owner, size)

    def _let_go(self, address: int) -> None:
        owner, data, size, let_go = self._kept.pop(address)
        if data in self._away:
            self._away.discard(data)
        else:
            self._add(owner, -size)
        let_go(address)

    def give_back(self, tensor: torch.Tensor, *, is_away: bool) -> None:
        """Count no more, or again, the memory of a tensor that is given back, or had again."""
        data = tensor.data_ptr()
        if (data in self._away) is is_away:
            return
        for owner, at, size, _ in [*self._kept.values()]:
            if at == data:
                self._away ^= {data}
                self._add(owner, -size if is_away else size)

    def _add(self, owner: int, size: int) -> None:
        have = self._have[owner] = self._have.get(owner, 0) + size
        self.peaks[owner] = max(have, self.peaks.get(owner, 0))


_meters: list[Meter] = []


@contextmanager
def metered() -> Iterator[Meter]:
    """Count what is had of the device's memory in the block.

    What is there before is not counted, and what is there after it is never let go.
    """
    meter = Meter()
    _meters.append(meter)
    try:
        yield meter
    finally:
        _meters.remove(meter)
        _ended.append(meter)  # tensors have its function


_ended: list[Meter] = []


def take(head: Tensor, tensor: torch.Tensor) -> None:
    """Count memory that a tensor has of the device from now on."""
    for meter in _meters:
        meter.take(head, tensor)


def give_back(tensor: torch.Tensor) -> None:
    """Count no more the memory that FSDP gives back."""
    for meter in _meters:
        meter.give_back(tensor, is_away=True)


def have_again(tensor: torch.Tensor) -> None:
    """Count again the memory that FSDP takes again."""
    for meter in _meters:
        meter.give_back(tensor, is_away=False)
