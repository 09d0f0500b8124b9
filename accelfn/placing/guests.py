# SPDX-License-Identifier: Apache-2.0
"""Parameters that are elsewhere, and come for the forward of their module."""

import attrs
import torch

from accelfn.weights.mapped import Mapped, is_aligned


@attrs.define(eq=False)
class Guest:
    """A parameter that comes for a forward, and how often it is in use."""

    param: torch.Tensor
    home: torch.Tensor
    device: torch.device
    file: Mapped | None = None
    ahead: torch.Tensor | None = None
    uses: int = 0

    def come(self) -> None:
        """Come, if it is not here, for one use more."""
        self.uses += 1
        if self.uses == 1:
            away = self.home.device != self.device
            if self.ahead is not None:
                self.param.data, self.ahead = self.ahead, None
            elif away:
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
