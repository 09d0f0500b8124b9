# SPDX-License-Identifier: Apache-2.0
"""Devices: meta tensors, float32 precision, generators, pinned memory, a rank's device.

Meta tensors have a shape but no values. A simulation runs a program with meta tensors to
measure how much the ranks send and store.
"""

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import torch

from accelfn.errors import WorldError


def readable(device: torch.device) -> torch.device:
    """Return a device whose tensors have values: the CPU instead of meta."""
    return torch.device("cpu") if device.type == "meta" else device


def is_positive(total: torch.Tensor) -> bool:
    """Return whether a total is positive; a meta tensor counts as positive."""
    return total.is_meta or bool(total > 0)


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the CPU; a meta tensor becomes zeros, equal on all ranks."""
    is_meta = tensor.is_meta
    return tensor.new_zeros(tensor.shape, device="cpu") if is_meta else tensor.cpu()


def is_set_to(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return `one.is_set_to(other)`: the same view of the same memory; also for meta tensors."""
    return _view(one) == _view(other) if one.is_meta else one.is_set_to(other)


def _view(tensor: torch.Tensor) -> tuple[Any, ...]:
    place = tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]
    return place, tensor.storage_offset(), tensor.shape, tensor.stride()


# Precision of float32 matrix products, which a program may lower for speed.
#
# torch has two interfaces for this setting. After the newer interface was used to set a
# device's precision, the older interface raises. This code uses the newer interface, which
# also shows changes made through the older one.


_EPS = {"tf32": 2.0**-10, "bf16": 2.0**-7}
"""Relative rounding error of the inputs of a matrix product, by precision."""


def precisions() -> tuple[str, ...]:
    """Return the precision setting of float32 matrix products for CUDA and for oneDNN."""
    return tuple(product.fp32_precision for product in _products())


def set_precisions(both: Sequence[str]) -> None:
    """Set the precision of float32 matrix products for CUDA and for oneDNN, in this order."""
    for backend, precision in zip(_products(), both, strict=True):
        backend.fp32_precision = precision


def eps() -> float:
    """Return the largest relative rounding error of float32 matrix products, over all devices."""
    return max(
        torch.finfo(torch.float32).eps, *(_EPS.get(p, 0.0) for p in precisions())
    )


def _products() -> tuple[Any, Any]:
    backends: Any = torch.backends
    return backends.cuda.matmul, backends.mkldnn.matmul


# The accelerators of this machine, from any vendor, through `torch.accelerator`.


def count() -> int:
    """Return the number of accelerator devices on this machine; 0 without an accelerator."""
    return torch.accelerator.device_count()


def kind() -> str:
    """Return the accelerator's device type for `torch.device(type)`, or "cpu"."""
    accelerator = torch.accelerator.current_accelerator() if count() else None
    return "cpu" if accelerator is None else accelerator.type


def generators(device: torch.device) -> Sequence[torch.Generator]:
    """Return the default random generators of a device; () for the CPU and meta.

    Raises:
        WorldError: torch has no generator object for the device.
    """
    if device.type in ("cpu", "meta"):
        return ()
    module: Any = torch.get_device_module(device)
    if device.type == "mps":
        return (module._get_default_mps_generator(),)
    if hasattr(module, "init"):
        module.init()  # creates the device's generators
    defaults: Sequence[torch.Generator] = getattr(module, "default_generators", ())
    index = module.current_device() if device.index is None else device.index
    if index >= len(defaults):
        msg = (
            f"Device {device}: torch.{device.type}.default_generators has no generator of this"
            " device. Its random numbers could not be reproduced, and a resumed run would"
            ' differ from an uninterrupted run. Pass device="cpu".'
        )
        raise WorldError(msg)
    return (defaults[index],)


def peak_memory(device: torch.device) -> int:
    """Return the largest number of bytes that torch had allocated on a device at once.

    Raises:
        WorldError: torch does not report the peak memory of this device.
    """
    peak: Any = getattr(torch.get_device_module(device), "max_memory_allocated", None)
    if peak is None:
        msg = f"Device {device}: torch.{device.type} does not report its peak memory."
        raise WorldError(msg)
    return peak(device)


def give_back_memory(device: torch.device) -> None:
    """Release the unused memory in torch's cache to the device."""
    if device.type not in ("cpu", "meta"):
        getattr(torch.get_device_module(device), "empty_cache", int)()


def wait_for_all(tensors: Iterable[torch.Tensor]) -> None:
    """Wait for all queued work on the tensors' devices, on every stream."""
    for device in {tensor.device for tensor in tensors}:
        if device.type not in ("cpu", "meta"):
            torch.get_device_module(device).synchronize(device)


@cache
def can_pin(device: torch.device) -> bool:
    """Return whether a device can copy to and from pinned memory asynchronously."""
    if device.type in ("cpu", "mps") or device.type != kind():
        return False  # the device shares the host's memory, or is not on this machine
    try:
        return torch.empty(1, pin_memory=True).is_pinned()
    except RuntimeError:
        return False


def host_memory(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Allocate a CPU tensor, in pinned memory if the device supports this."""
    return torch.empty(shape, dtype=dtype, pin_memory=can_pin(device))


def pin(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a CPU tensor in pinned memory, if the device supports this."""
    is_ready = not tensor.is_cpu or not can_pin(device) or tensor.is_pinned()
    return tensor if is_ready else tensor.pin_memory()


def send_async(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a CPU tensor to a device, asynchronously if the device supports this."""
    return pin(tensor, device).to(device, non_blocking=can_pin(device))


# The device of a rank: the CPU, or any accelerator that torch supports.


_NO_XLA = (
    "Device {!r}: torch_xla's newest release, 2.9.0, needs torch 2.9, and accelfn needs 2.11"
    " or later. On TPUs use TorchTPU (pip install torch-tpu), whose device is 'tpu'."
)


def parse_device(device: Any) -> torch.device:
    """Return a device argument as a `torch.device`.

    Raises:
        WorldError: torch does not know the device.
    """
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        msg = (
            f"Device {device!r}: torch does not know this device: {error}. For a device of"
            " another vendor, install its package, such as torch-npu for 'npu'."
        )
        raise WorldError(msg) from error


def check_kind(asked: torch.device) -> None:
    """Raise unless ranks can compute on devices of this type.

    Raises:
        WorldError: the type is not the CPU or an accelerator.
    """
    if asked.type == "xla":
        raise WorldError(_NO_XLA.format(str(asked)))
    if asked.type == "meta":
        msg = f"Device {str(asked)!r}: its tensors have no values. Use cpu or an accelerator."
        raise WorldError(msg)


def choose_device(asked: str | torch.device | None, *, local_rank: int) -> torch.device:
    """Return the requested device, the local rank's accelerator, or the CPU.

    Raises:
        WorldError: the device does not exist, or its random numbers cannot be reproduced.
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
            f"Local rank {local_rank} needs the device {chosen.type}:{index}, but torch finds"
            f" {num_devices} devices of this type. Start fewer ranks per machine, or pass"
            ' device="cpu".'
        )
        raise WorldError(msg)
    chosen = torch.device(chosen.type, index)
    generators(chosen)
    torch.accelerator.set_device_index(index)
    return chosen
