# SPDX-License-Identifier: Apache-2.0
"""`in_memory`: what was tracked, as dicts, for notebooks and tests."""

from collections.abc import Mapping
from typing import Any

import attrs

from accelfn.base.calling import called
from accelfn.track.tracker import IMAGES, Tracker, open_tracker
from accelfn.track.values import Pixels, Plain
from accelfn.world import World


@attrs.define
class Kept:
    """What was tracked: by name, then by step."""

    metrics: dict[str, dict[int, float]] = attrs.field(factory=dict)
    hyperparameters: dict[str, Plain] = attrs.field(factory=dict)
    images: dict[str, dict[int, Pixels]] = attrs.field(factory=dict)


class _InMemory:
    def __init__(self) -> None:
        self.backend = Kept()

    def metrics(self, metrics: Mapping[str, float], step: int) -> None:
        _keep(self.backend.metrics, metrics, step)

    def hyperparameters(self, hyperparameters: Mapping[str, Plain]) -> None:
        self.backend.hyperparameters.update(hyperparameters)

    def images(self, images: Mapping[str, Pixels], step: int) -> None:
        _keep(self.backend.images, images, step)

    def close(self, *, failed: bool) -> None:
        """Keep all."""


def _keep(kept: dict[str, dict[int, Any]], given: Mapping[str, Any], step: int) -> None:
    for name, value in given.items():
        kept.setdefault(name, {})[step] = value


@called
def in_memory(*, world: World) -> Tracker:
    """Return a tracker that keeps what it is told: name, step, value.

    Example:
        >>> tracker = in_memory(world=World.single())
        >>> tracker({"loss": 0.5}, 1)
        >>> tracker.backends["in_memory"].metrics
        {'loss': {1: 0.5}}
    """
    accepts = (IMAGES,)
    return open_tracker("in_memory", _InMemory, world=world, accepts=accepts)
