# SPDX-License-Identifier: Apache-2.0
"""What of a state says which update is next, for what is computed of it alone."""

from typing import Protocol

from accelfn.definition.definition import Definition


class Moment(Protocol):
    """A state between two updates; `TrainState` is one."""

    @property
    def definition(self) -> Definition:
        """What it is a state of."""
        ...

    @property
    def step(self) -> int:
        """How many updates were applied."""
        ...

    @property
    def num_tried(self) -> int:
        """How many were tried, those too that were skipped."""
        ...

    @property
    def seed(self) -> int:
        """What all draws are derived from."""
        ...
