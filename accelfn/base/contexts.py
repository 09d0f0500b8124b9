# SPDX-License-Identifier: Apache-2.0
"""Contexts that are entered at every step, where there is mostly nothing to do."""

from contextlib import AbstractContextManager, ExitStack, nullcontext

import torch
from torch.autograd import profiler

NOTHING = nullcontext()
"""A context that does nothing: of one instance, which costs no call."""
# asked at every step and batch: without a device's name to be parsed, or names to look up
_with_gradients, _for_inference = torch.is_grad_enabled, torch.is_inference_mode_enabled
_any_autocast = torch._C._is_any_autocast_enabled  # pyright: ignore[reportPrivateUsage]


def own_modes(device: torch.device) -> AbstractContextManager[object]:
    """Return a context with gradients on, and inference mode and autocast off.

    A tensor made in inference mode could never be trained again, so whatever makes one for
    a state runs in here. It is entered at every step, where the modes are mostly right
    already: then nothing is done.
    """
    inference = _for_inference()
    autocast = _any_autocast() and torch.is_autocast_enabled(device.type)
    if _with_gradients() and not inference and not autocast:
        return NOTHING
    stack = ExitStack()
    if inference:
        stack.enter_context(torch.inference_mode(mode=False))
    stack.enter_context(torch.enable_grad())
    if autocast:
        stack.enter_context(torch.autocast(device.type, enabled=False))
    return stack


def is_plain() -> bool:
    """Whether a step's own modes are on, and nothing is recorded: there is nothing to enter.

    For what takes so few microseconds that the contexts above would be a tenth of it.
    """
    return (
        _with_gradients()
        and not _for_inference()
        and not _any_autocast()
        and not profiler._is_profiler_enabled  # pyright: ignore[reportPrivateUsage]
    )


def is_profiled() -> bool:
    """Whether torch's profiler records now."""
    return profiler._is_profiler_enabled  # pyright: ignore[reportPrivateUsage]


def span(*words: str) -> AbstractContextManager[object]:
    """Return a context whose time stands in a profiler's trace under these words.

    Where every step comes by, the caller asks torch's profiler itself, and saves a call.
    """
    return profiler.record_function(" ".join(words)) if is_profiled() else NOTHING
