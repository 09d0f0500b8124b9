# SPDX-License-Identifier: Apache-2.0
"""Hooks with which parameters come for the forward of their module, and go after it."""

from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from accelfn.errors import ModelError
from accelfn.placing.ahead import Ahead
from accelfn.placing.guests import Guest


def let_in(
    stack: ExitStack, module: nn.Module, guests: tuple[Guest, ...], ahead: Ahead | None
) -> None:
    """Let guests come before a module's forward, and go after it, whatever it raises."""

    def before(_module: nn.Module, _args: Any) -> None:
        told = None if all(guest.uses for guest in guests) else ahead
        if told is not None:
            told.receive(guests)
        for guest in guests:
            guest.come()
        if told is not None:
            told.send()
        if torch.is_grad_enabled():
            msg = (
                "af.placed: gradients are on in its block, and parameters are gone before"
                " a backward pass. Leave out torch.enable_grad(); a model that is trained over"
                " several devices is split by af.wrap_fsdp()."
            )
            raise ModelError(msg)

    def after(_module: nn.Module, _args: Any, _output: Any) -> None:
        for guest in guests:
            guest.go()

    stack.callback(module.register_forward_pre_hook(before, prepend=True).remove)
    stack.callback(module.register_forward_hook(after, always_call=True).remove)
