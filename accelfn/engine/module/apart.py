# SPDX-License-Identifier: Apache-2.0
"""Where ranks have features or positions of their own, each draws for itself."""

import torch

from accelfn.base import draws
from accelfn.world import World

States = list[torch.Tensor]


class Apart:
    """Seeds torch's default generators by rank for a stretch of a loss, and puts them back.

    Which stretch a generator is in, its seed tells: so activations that are computed again,
    with the generators as they were, draw again what they drew, wherever the part that is
    computed again begins or ends.
    """

    def __init__(self, ranks: World) -> None:
        """Take the ranks that draw each for itself."""
        self._ranks = ranks
        self._alike: dict[int, tuple[States, States]] = {}

    def begin(self) -> None:
        """Know of no stretch."""
        self._alike = {}

    def draw(self, place: str) -> None:
        """Let this rank draw for itself from now on, where it does not already."""
        first = self._generators()[0]
        if first.initial_seed() in self._alike:
            return
        # no number is drawn for it: what all ranks draw is as it would be without
        before = self._states()
        told = b"".join(each.cpu().numpy().tobytes() for each in before)
        key = draws.key(told.hex(), place, self._ranks.rank)
        for each in self._generators():
            each.manual_seed(key)
        self._alike[first.initial_seed()] = before, self._states()

    def draw_alike(self) -> None:
        """Let all ranks draw alike again, as they did before this one drew for itself."""
        generators = self._generators()
        kept = self._alike.get(generators[0].initial_seed())
        if kept is None:
            return
        before, begun = kept
        has_drawn = not all(map(torch.equal, begun, self._states()))
        for each, state in zip(generators, before, strict=True):
            each.set_state(state)
            if has_drawn:  # or layers that are called twice would draw the same twice
                torch.rand((), generator=each, device=each.device)

    def _generators(self) -> list[torch.Generator]:
        return draws.generators(self._ranks.device)

    def _states(self) -> States:
        return [each.get_state() for each in self._generators()]
