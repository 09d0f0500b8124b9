# SPDX-License-Identifier: Apache-2.0
"""Parameters that are elsewhere, and come for the forward of their module."""

from contextlib import ExitStack
from typing import Any

import attrs
import torch
from torch import nn

from accelfn.errors import ModelError
from accelfn.weights.mapped import Mapped, is_aligned


@attrs.define(eq=False)
class Guest:
    """A parameter that comes for a forward, and how often it is in use."""

    param: torch.Tensor
    home: torch.Tensor
    device: torch.device
    file: Mapped | None = None
    uses: int = 0

    def come(self) -> None:
        """Come, if it is not here, for one use more."""
        self.uses += 1
        if self.uses == 1:
            away = self.home.device != self.device
            if away:
                self.param.data = self.home.to(self.device)
            elif not is_aligned(self.home):
                self.param.data = self.home.clone()

    def go(self) -> None:
        """Go home, if this was its last use."""
        self.uses -= 1
        if not self.uses:
            self.param.data = self.home
            if self.file is not None:
                self.file.drop()


def let_in(stack: ExitStack, module: nn.Module, guests: list[Guest]) -> None:
    """Let guests come before a module's forward, and go after it, whatever it raises."""

    def before(_module: nn.Module, _args: Any) -> None:
        for guest in guests:
            guest.come()
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
