# SPDX-License-Identifier: Apache-2.0
"""The caller's grad, inference and autocast modes, kept away from what a state owns."""

from contextlib import AbstractContextManager, ExitStack

import torch


class _Nothing(AbstractContextManager[None]):
    def __exit__(self, *error: object) -> None:
        return None


_NOTHING = _Nothing()
# asked at every step, so without a device's name to be parsed
_any_autocast = torch._C._is_any_autocast_enabled  # pyright: ignore[reportPrivateUsage]


def own_modes(device: torch.device) -> AbstractContextManager[object]:
    """Return a context with gradients on, and inference mode and autocast off.

    A tensor made in inference mode could never be trained again, so whatever makes one for
    a state runs in here. It is entered at every step, where the modes are mostly right
    already: then nothing is done.
    """
    inference = torch.is_inference_mode_enabled()
    autocast = _any_autocast() and torch.is_autocast_enabled(device.type)
    if torch.is_grad_enabled() and not inference and not autocast:
        return _NOTHING
    stack = ExitStack()
    if inference:
        stack.enter_context(torch.inference_mode(mode=False))
    stack.enter_context(torch.enable_grad())
    if autocast:
        stack.enter_context(torch.autocast(device.type, enabled=False))
    return stack
