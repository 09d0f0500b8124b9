# SPDX-License-Identifier: Apache-2.0
"""This machine's accelerator, of whatever make, through torch's one interface to all of them."""

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import torch

from accelfn.errors import WorldError


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


def pins(device: torch.device) -> bool:
    """Whether there is host memory from and to which a device copies without a wait."""
    return _pins(device.type)


@cache
def _pins(kind_of_device: str) -> bool:
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
    return torch.empty(shape, dtype=dtype, pin_memory=_pins(device.type))


def staged(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor of the host where a device copies from without a wait, if it can."""
    there = not tensor.is_cpu or not _pins(device.type) or tensor.is_pinned()
    return tensor if there else tensor.pin_memory()


def sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor of the host on a device, to which it is under way; nobody waits."""
    return staged(tensor, device).to(device, non_blocking=_pins(device.type))
