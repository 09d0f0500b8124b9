# SPDX-License-Identifier: Apache-2.0
"""On which device a rank computes: any that torch calls an accelerator, or the CPU."""

from typing import Any

import torch

from accelfn.base import accelerator
from accelfn.errors import WorldError

_NO_XLA = (
    "Device {!r}: torch_xla's newest release, 2.9.0, needs torch 2.9, and accelfn needs 2.13"
    " or later. On TPUs use TorchTPU (pip install torch-tpu), whose device is 'tpu'."
)


def known_device(device: Any) -> torch.device:
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


def chosen_device(asked: str | torch.device | None, *, local_rank: int) -> torch.device:
    """Return the device asked for, or the local rank's of the accelerator, or the CPU.

    Raises:
        WorldError: it is not there, or what is drawn on it could not be drawn again.
    """
    if asked is None:
        asked = accelerator.kind()
    chosen = known_device(asked)
    check_kind(chosen)
    if chosen.type == "cpu":
        return chosen
    num_devices = accelerator.count() if chosen.type == accelerator.kind() else 0
    index = local_rank if chosen.index is None else chosen.index
    if index >= num_devices:
        msg = (
            f"Device {chosen.type}:{index} was asked for (local rank {local_rank}), but"
            f" torch sees {num_devices} devices of that type. Start fewer ranks per machine, or"
            ' pass device="cpu".'
        )
        raise WorldError(msg)
    chosen = torch.device(chosen.type, index)
    accelerator.generators(chosen)
    torch.accelerator.set_device_index(index)
    return chosen
