# SPDX-License-Identifier: Apache-2.0
"""The device of the benchmarks: the CPU, or the accelerator of `run.py --device`."""

import os
import time
from collections.abc import Callable

import torch
from torch import nn

import accelfn as af

DEVICE = torch.device(os.environ.get("BENCH_DEVICE", "cpu"))
IS_CPU = DEVICE.type == "cpu"


def there(make: Callable[[], nn.Module]) -> nn.Module:
    """Return a model on the device."""
    return make().to(DEVICE)


def alone() -> af.World:
    """Return the world of one process."""
    return af.World.single(device=DEVICE)


def wait() -> None:
    """Wait until the device has finished its work."""
    if not IS_CPU:
        torch.accelerator.synchronize()


def computing() -> Callable[[], float]:
    """Return the clock for ranks that share cores.

    On the CPU, this is the CPU time of the process. It does not include the work of an
    accelerator, so there it is the elapsed time.
    """
    return time.process_time if IS_CPU else time.perf_counter
