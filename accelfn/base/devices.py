# SPDX-License-Identifier: Apache-2.0
"""What is asked of tensors that have a shape and no values, on torch's meta device.

A program runs on them where only its shapes are of interest: what it sends, and how much.
"""

import ctypes
import mmap
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import torch

from accelfn.errors import WorldError


def readable(device: torch.device) -> torch.device:
    """Return the device for tensors that will be read: the host, in place of meta."""
    return torch.device("cpu") if device.type == "meta" else device


def is_positive(total: torch.Tensor) -> bool:
    """Return whether a total is positive; one without a value is taken to be."""
    return total.is_meta or bool(total > 0)


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the host; of one without values, zeros, of which none differs."""
    return (
        torch.zeros(tensor.shape, dtype=tensor.dtype)
        if tensor.is_meta
        else tensor.cpu()
    )


def is_set_to(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors are one memory, seen alike; torch cannot say it of meta."""
    if not one.is_meta:
        return one.is_set_to(other)
    return other.is_meta and _view(one) == _view(other)


def _view(tensor: torch.Tensor) -> tuple[Any, ...]:
    place = tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]
    return place, tensor.storage_offset(), tensor.shape, tensor.stride()


# How precisely torch multiplies float32, which a program may lower to be faster.
#
# torch has two interfaces to one setting, and refuses the older once the newer was used for
# one of the devices: the newer is read here, which knows what the older sets.


_EPS = {"tf32": 2.0**-10, "bf16": 2.0**-7}
"""Of what a product's factors are rounded to."""


def precisions() -> tuple[str, ...]:
    """Return the precision on CUDA's devices, and that of oneDNN on others."""
    return tuple(each.fp32_precision for each in _products())


def set_precisions(both: Sequence[str]) -> None:
    """Set both."""
    for each, precision in zip(_products(), both, strict=True):
        each.fp32_precision = precision


def eps() -> float:
    """Return the rounding of a product of float32, on whichever device it is coarsest."""
    return max(
        torch.finfo(torch.float32).eps, *(_EPS.get(p, 0.0) for p in precisions())
    )


def _products() -> tuple[Any, Any]:
    backends: Any = torch.backends
    return backends.cuda.matmul, backends.mkldnn.matmul


# This machine's accelerator, of whatever make, through torch's one interface to all of
# them.


def count() -> int:
    """Return how many devices the accelerator of this torch has here; often none."""
    return torch.accelerator.device_count()


def kind() -> str:
    """Return the type of its devices, as in `torch.device(type)`: "cpu" where there are none."""
    found = torch.accelerator.current_accelerator() if count() else None
    return "cpu" if found is None else found.type


def generators(device: torch.device) -> Sequence[torch.Generator]:
    """Return the default generators that a device has beside the CPU's.

    Raises:
        WorldError: torch gives none out, so that draws on the device could not be repeated.
    """
    if device.type in ("cpu", "meta"):
        return ()
    module: Any = torch.get_device_module(device)
    if device.type == "mps":
        return (module._get_default_mps_generator(),)
    if hasattr(module, "init"):
        module.init()  # there are no generators before
    made: Sequence[torch.Generator] = getattr(module, "default_generators", ())
    index = module.current_device() if device.index is None else device.index
    if index >= len(made):
        msg = (
            f"Device {device}: torch.{device.type}.default_generators has none for it, so what"
            " is drawn there could not be drawn again, and no resumed run would be the"
            ' uninterrupted one. Pass device="cpu".'
        )
        raise WorldError(msg)
    return (made[index],)


def peak_memory(device: torch.device) -> int:
    """Return the most bytes that torch has had of a device's memory.

    Raises:
        WorldError: it does not count them there.
    """
    asked: Any = getattr(torch.get_device_module(device), "max_memory_allocated", None)
    if asked is None:
        msg = f"Device {device}: torch.{device.type} does not say how much memory was had."
        raise WorldError(msg)
    return asked(device)


def give_back_memory(device: torch.device) -> None:
    """Let others have the memory that torch keeps of a device without a use for it."""
    if device.type not in ("cpu", "meta"):
        getattr(torch.get_device_module(device), "empty_cache", int)()


def wait_for_all(tensors: Iterable[torch.Tensor]) -> None:
    """Wait for what the devices of tensors were given to do, on whatever stream."""
    for device in {each.device for each in tensors}:
        if device.type not in ("cpu", "meta"):
            torch.get_device_module(device).synchronize(device)


def can_pin(device: torch.device) -> bool:
    """Whether there is host memory from and to which a device copies without a wait."""
    return _can_pin(device.type)


@cache
def _can_pin(kind_of_device: str) -> bool:
    """Whether torch has host memory from which such a device copies by itself."""
    if kind_of_device in ("cpu", "mps") or kind_of_device != kind():
        return False  # it has the host's memory, or is none of this machine
    try:
        return torch.empty(1, pin_memory=True).is_pinned()
    except RuntimeError:
        return False


def host_memory(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return host memory to and from which a device copies without a wait, where it can."""
    return torch.empty(shape, dtype=dtype, pin_memory=_can_pin(device.type))


def pin(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor of the host where a device copies from without a wait, if it can."""
    there = not tensor.is_cpu or not _can_pin(device.type) or tensor.is_pinned()
    return tensor if there else tensor.pin_memory()


def send_async(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor of the host on a device, to which it is under way; nobody waits."""
    return pin(tensor, device).to(device, non_blocking=_can_pin(device.type))


# Memory that is filled at once, in large pages where the system has them.
#
# The system gives memory when it is first written to, a page at a time. A model of 500 MB
# takes 130,000 pages of 4 KiB, and giving them takes longer than reading its file; of 2 MiB
# it takes 260.


_HUGE_PAGE = 1 << 21
"""Bytes of a large page, on most machines."""
_ADVICE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)
"""What Linux calls them; no other system takes such advice."""


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return memory of the host for a tensor whose values come from a file.

    Cost: that of `torch.empty`, and for a large tensor one call of the system. No page reaches
    beyond the tensor, so nobody's memory grows.
    """
    tensor = torch.empty(tuple(shape), dtype=dtype, device="cpu")
    if _ADVICE is not None and tensor.nbytes >= 2 * _HUGE_PAGE:
        begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
        last = end // mmap.PAGESIZE * mmap.PAGESIZE
        # a system without large pages says no, and gives small ones
        ctypes.CDLL(None).madvise(
            ctypes.c_void_p(first), ctypes.c_size_t(last - first), _ADVICE
        )
    return tensor


# On which device a rank computes: any that torch calls an accelerator, or the CPU.


_NO_XLA = (
    "Device {!r}: torch_xla's newest release, 2.9.0, needs torch 2.9, and accelfn needs 2.13"
    " or later. On TPUs use TorchTPU (pip install torch-tpu), whose device is 'tpu'."
)


def parse_device(device: Any) -> torch.device:
    """Return what torch makes of it.

    Raises:
        WorldError: torch knows no such device.
    """
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        msg = (
            f"Device {device!r} is none that torch knows: {error}. One of another make is known"
            " once its package is installed, as torch-npu for 'npu'."
        )
        raise WorldError(msg) from error


def check_kind(asked: torch.device) -> None:
    """Raise unless ranks can compute on devices of this type.

    Raises:
        WorldError: it is no type of an accelerator.
    """
    if asked.type == "xla":
        raise WorldError(_NO_XLA.format(str(asked)))
    if asked.type == "meta":
        msg = f"Device {str(asked)!r} holds no values; expected cpu or an accelerator."
        raise WorldError(msg)


def choose_device(asked: str | torch.device | None, *, local_rank: int) -> torch.device:
    """Return the device asked for, or the local rank's of the accelerator, or the CPU.

    Raises:
        WorldError: it is not there, or what is drawn on it could not be drawn again.
    """
    if asked is None:
        asked = kind()
    chosen = parse_device(asked)
    check_kind(chosen)
    if chosen.type == "cpu":
        return chosen
    num_devices = count() if chosen.type == kind() else 0
    index = local_rank if chosen.index is None else chosen.index
    if index >= num_devices:
        msg = (
            f"Device {chosen.type}:{index} was asked for (local rank {local_rank}), but"
            f" torch sees {num_devices} devices of that type. Start fewer ranks per machine, or"
            ' pass device="cpu".'
        )
        raise WorldError(msg)
    chosen = torch.device(chosen.type, index)
    generators(chosen)
    torch.accelerator.set_device_index(index)
    return chosen
