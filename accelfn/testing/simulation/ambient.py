# SPDX-License-Identifier: Apache-2.0
"""What a process has once and every simulated rank has of its own.

The random generators of torch, numpy and Python, the default dtype, the process groups that
torch knows, and a few attributes that `with` blocks set and put back: they belong to a
process, so they are swapped when the turn passes. Modes (gradients, inference, autocast,
the default device) belong to a thread: ranks enter the caller's.
"""

import os
import random
import sys
import warnings
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import ModuleType
from typing import Any

import attrs
import numpy as np
import torch
from numpy.random import mtrand
from torch import overrides
from torch.distributed import distributed_c10d
from torch.utils import _device

from accelfn.base import accelerator, draws
from accelfn.testing.simulation import dtensors
from accelfn.testing.simulation.registry import Registry

# torch and numpy have no public names for what threads and processes have once
# pyright: reportPrivateUsage=false

_GROUPS = (distributed_c10d, "_world")
_FILTERS = (warnings, "filters")
_TURN = (draws, "_turn")
_ATTRIBUTES: tuple[tuple[ModuleType, str], ...] = (
    *(_GROUPS, _FILTERS, _TURN, *dtensors.ASKED),
    *((warnings, "showwarning"), (warnings, "_showwarnmsg_impl")),
    *((sys, "stdout"), (sys, "stderr")),
    (_device, "CURRENT_DEVICE"),
)


@attrs.define
class _Kept:
    """One rank's share of the process."""

    generators: list[torch.Tensor]
    python: Any
    bits: np.random.BitGenerator
    normal: tuple[int, float]
    dtype: torch.dtype
    attributes: list[Any]

    @classmethod
    def of_process(cls, device: torch.device) -> "_Kept":
        return cls(
            generators=[each.get_state() for each in draws.generators(device)],
            python=random.getstate(),
            bits=mtrand.get_bit_generator(),
            normal=draws.normal_of_numpy(),
            dtype=torch.get_default_dtype(),
            attributes=[getattr(module, name) for module, name in _ATTRIBUTES],
        )

    def put_back(self, device: torch.device) -> None:
        for each, state in zip(draws.generators(device), self.generators, strict=True):
            each.set_state(state)
        random.setstate(self.python)
        mtrand.set_bit_generator(self.bits)
        draws.put_back_normal_of_numpy(self.normal)
        if torch.get_default_dtype() is not self.dtype:
            torch.set_default_dtype(self.dtype)
        for (module, name), value in zip(_ATTRIBUTES, self.attributes, strict=True):
            setattr(module, name, value)


class Ambient:
    """Each rank's share of the process, swapped in and out with its turn."""

    def __init__(
        self, seed: int, registries: list[Registry], device: torch.device
    ) -> None:
        """Take the seed of all ranks, what torch is to know of groups in each, their device."""
        self._seed = seed
        self._registries = registries
        self._device = device
        self._callers = _Kept.of_process(device)
        self._kept: dict[int, _Kept] = {}

    def enter(self, rank: int) -> None:
        """Make the process this rank's."""
        kept = self._kept.get(rank)
        if kept is None:
            self._callers.put_back(self._device)
            mtrand.set_bit_generator(np.random.MT19937(0))
            seed_rank(self._seed, rank, self._device)
            setattr(*_FILTERS, list(warnings.filters))
            setattr(*_GROUPS, self._registries[rank])
            setattr(*_TURN, draws.Turn())
            dtensors.tell_rank()
        else:
            kept.put_back(self._device)

    def begin_anew(self, rank: int, registry: Registry) -> None:
        """Make the process this rank's as it is at a rank's start."""
        self._registries[rank] = registry
        self._kept.pop(rank, None)
        self.enter(rank)

    def leave(self, rank: int) -> None:
        """Keep what this rank made of it."""
        self._kept[rank] = _Kept.of_process(self._device)


def seed_rank(seed: int, rank: int, device: torch.device) -> None:
    """Seed the process's generators as this rank's are at its start."""
    number = draws.key(seed, "rank", rank)
    for each in draws.generators(device):
        each.manual_seed(number)
    random.seed(number)
    np.random.seed(number % 2**32)  # noqa: NPY002 - the one that users' code draws from


@contextmanager
def process_kept(device: torch.device) -> Generator[None]:
    """Put the process back as it was, whatever ranks do to it."""
    kept = _Kept.of_process(device)
    deterministic = _deterministic()
    environment = dict(os.environ)
    try:
        yield
    finally:
        kept.put_back(device)
        if _deterministic() != deterministic:  # setting it imports a compiler
            torch.use_deterministic_algorithms(
                deterministic[0], warn_only=deterministic[1]
            )
        if dict(os.environ) != environment:
            for name in set(os.environ) - set(environment):
                del os.environ[name]
            os.environ.update(environment)


def _deterministic() -> tuple[bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


def callers_modes(
    device: torch.device,
) -> Callable[[], AbstractContextManager[object]]:
    """Return what enters, in another thread, the modes that are on in this one.

    There a device's backward pass stays in the thread, which is that of a rank: torch would
    run it in one of the device's own, where the hooks of any rank would be the process's.
    """
    grad = torch.is_grad_enabled()
    inference = torch.is_inference_mode_enabled()
    threads = torch.get_num_threads()
    cache = torch.is_autocast_cache_enabled()
    casts = [
        (kind, torch.get_autocast_dtype(kind))
        for kind in dict.fromkeys(["cpu", accelerator.kind()])
        if torch.is_autocast_enabled(kind)
    ]
    modes = overrides._get_current_function_mode_stack()
    default = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)

    def enter() -> ExitStack:
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        torch.set_autocast_cache_enabled(cache)
        torch._GLOBAL_DEVICE_CONTEXT.device_context = default
        stack = ExitStack()
        stack.enter_context(torch.inference_mode(mode=inference))
        stack.enter_context(torch.set_grad_enabled(grad))
        for kind, dtype in casts:
            cast = torch.autocast(kind, dtype=dtype, cache_enabled=cache)
            stack.enter_context(cast)
        if device.type not in ("cpu", "meta"):
            torch.accelerator.set_device_index(device)
            one_thread = torch.autograd.set_multithreading_enabled(mode=False)
            stack.enter_context(one_thread)
        stack.callback(_leave_function_modes)
        for mode in modes:
            overrides._push_mode(mode)
        return stack

    return enter


def _leave_function_modes() -> None:
    """Leave all that this thread is in: its end must not find any."""
    while overrides._get_current_function_mode_stack():
        overrides._pop_mode()
