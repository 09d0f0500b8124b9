# SPDX-License-Identifier: Apache-2.0
"""The caller's grad, inference and autocast modes, kept away from what a state owns."""

from contextlib import AbstractContextManager, ExitStack

import torch


class _Nothing(AbstractContextManager[None]):
    def __exit__(self, *error: object) -> None:
        return None


_NOTHING = _Nothing()


def own_modes(device: torch.device) -> AbstractContextManager[object]:
    """Return a context with gradients on, and inference mode and autocast off.

    A tensor made in inference mode could never be trained again, so whatever makes one for
    a state runs in here. It is entered at every step, where the modes are mostly right
    already: then nothing is done.
    """
    inference = torch.is_inference_mode_enabled()
    autocast = torch.is_autocast_enabled(device.type)
    if torch.is_grad_enabled() and not inference and not autocast:
        return _NOTHING
    stack = ExitStack()
    if inference:
        stack.enter_context(torch.inference_mode(mode=False))
    stack.enter_context(torch.enable_grad())
    if autocast:
        stack.enter_context(torch.autocast(device.type, enabled=False))
    return stack
