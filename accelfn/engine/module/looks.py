# SPDX-License-Identifier: Apache-2.0
"""What layers are given where they are split, beside what they are given in one piece."""

import math

import torch

from accelfn.world import World

_FAR = 1e-3
"""How much of what a layer is given may be otherwise, by its norm: the order of sums may."""
_COARSE = 0.1
"""The same, where a loss is computed in 16 bits."""


class Looks:
    """Compares the features that row layers are given with those of the whole."""

    def __init__(self, ranks: World) -> None:
        """Take the ranks that have features, in order."""
        self._ranks = ranks
        self._wholes: dict[str, torch.Tensor] | None = None
        self._parts: dict[str, torch.Tensor] = {}

    def begin(self) -> None:
        """Keep what layers are given from now on."""
        self._wholes, self._parts = {}, {}

    def see(self, place: str, given: torch.Tensor, *, is_whole: bool) -> None:
        """Keep what a layer is given, the last time that it is called."""
        if self._wholes is not None and not torch.is_grad_enabled():
            seen = self._wholes if is_whole else self._parts
            seen[place] = given.detach()

    def end(self) -> str | None:
        """Let go of it; return the first layer that was given others, if there is one."""
        wholes, parts = self._wholes or {}, self._parts
        self._wholes, self._parts = None, {}
        if wholes.keys() != parts.keys():
            return next(iter(wholes.keys() ^ parts.keys()))
        differing = (n for n, whole in wholes.items() if not self._fit(whole, parts[n]))
        return next(differing, None)

    def _fit(self, whole: torch.Tensor, given: torch.Tensor) -> bool:
        part = whole.chunk(self._ranks.size, -1)[self._ranks.rank]
        if part.shape != given.shape:
            return False
        if part.is_meta:
            return True
        far = _COARSE if given.dtype.itemsize < 4 else _FAR
        distance, length = ((each.double().norm()) for each in (given - part, part))
        return not math.isfinite(distance) or bool(distance <= far * length)
