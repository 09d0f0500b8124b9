# SPDX-License-Identifier: Apache-2.0
"""`RootModule`: a module whose forward is the loss, for engines that take a model apart."""

import torch
from torch import nn

from accelfn.collectives import broadcast_
from accelfn.engine.read_loss import ReadLoss, Samples, read_loss
from accelfn.engine.runner import LossFunction
from accelfn.world import World


class RootModule(nn.Module):
    """A module whose forward is the loss, so that the loss sees the plain model."""

    def __init__(self, module: nn.Module) -> None:
        """Take the model."""
        super().__init__()
        self.module = module
        self._reads: list[ReadLoss] = []
        self._shared: list[torch.Tensor] | None = None

    def forward(self, loss_fn: LossFunction, samples: Samples) -> torch.Tensor:
        """Return the loss."""
        returned = loss_fn(self.module, samples.value, *samples.extras)
        read = read_loss(returned, loss_fn, samples)
        self._reads.append(read)
        return read.scalar

    def take_read(self) -> ReadLoss:
        """Return what the last pass has read, and leave nothing of those that raised."""
        read = self._reads.pop()
        self._reads.clear()
        return read

    def share_buffers(self, ranks: World) -> None:
        """Let an update begin with rank 0's buffers, as DDP's does; a collective."""
        if self._shared is None:  # the tensors stay: see `Buffers`
            self._shared = list(self.module.buffers())
        if self._shared:
            broadcast_(self._shared, ranks, label="buffers of rank 0")
