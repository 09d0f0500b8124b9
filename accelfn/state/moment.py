# SPDX-License-Identifier: Apache-2.0
"""A state at one moment, to be read: what is computed of it, and transforms see of it."""

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from accelfn.data import Data
from accelfn.data.cursor import Cursor
from accelfn.definition.definition import Definition
from accelfn.definition.transform import chain
from accelfn.world import World


class Moment(Protocol):
    """A state between two updates; `TrainState` is one."""

    @property
    def definition(self) -> Definition:
        """What it is a state of."""
        ...

    @property
    def setup(self) -> chain:
        """The transforms."""
        ...

    @property
    def world(self) -> World:
        """The world it trains in."""
        ...

    @property
    def data(self) -> Data | None:
        """What it is trained on, if it knows."""
        ...

    @property
    def params(self) -> Mapping[str, torch.Tensor]:
        """The parameters by name."""
        ...

    @property
    def buffers(self) -> Mapping[str, torch.Tensor]:
        """The buffers by name."""
        ...

    @property
    def opt_state(self) -> Mapping[str, Mapping[str, Any]]:
        """What the optimizer keeps, by parameter name."""
        ...

    @property
    def slots(self) -> Mapping[str, Any]:
        """The transforms' entries and the user's own, by name."""
        ...

    @property
    def cursor(self) -> Cursor:
        """Which samples were seen."""
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
