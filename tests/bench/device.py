# SPDX-License-Identifier: Apache-2.0
"""Where contestants compute: on the CPU, or on the accelerator that `run.py --device` names."""

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
    """Wait for what the device was given to do."""
    if not IS_CPU:
        torch.accelerator.synchronize()


def computing() -> Callable[[], float]:
    """Return a clock for ranks that share cores: what the process computed, or all that passed.

    Of an accelerator's work the host's clock of computing knows nothing.
    """
    return time.process_time if IS_CPU else time.perf_counter
