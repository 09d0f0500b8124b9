# SPDX-License-Identifier: Apache-2.0
"""What an engine asks of an optimizer: torch's own at work, or one that somebody else runs."""

from typing import Protocol

import torch

from accelfn.engine.optimizer.live_optimizer import State
from accelfn.state.metrics import Number
from accelfn.structure.prototype import Assignments


class TakesUpdates(Protocol):
    """Steps the tensors of a home."""

    @property
    def skips(self) -> bool:
        """Whether its own kernel leaves an update out by a flag on the device."""
        ...

    @property
    def is_untouched(self) -> bool:
        """Whether an update that raised has, for sure, changed nothing of the state."""
        ...

    def load(self, state: State) -> None:
        """Take over a state's entries."""
        ...

    def expect(self, planned: Assignments) -> None:
        """Expect an update, of which nothing has been done; raise where it could not be taken."""
        ...

    def divides(self, divisor: Number) -> bool:
        """Whether it divides gradients by this itself."""
        ...

    def update(
        self,
        hyper: Assignments,
        divisor: Number | None = None,
        skip: torch.Tensor | None = None,
    ) -> State | None:
        """Step, and return the optimizer's state by name; None where it left the update out."""
        ...
