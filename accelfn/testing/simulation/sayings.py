# SPDX-License-Identifier: Apache-2.0
"""Sayings: what simulated ranks say of one thing, compared without a collective."""

from collections import Counter


class Sayings:
    """What ranks said that not all have said yet, by what it is of and how often they did."""

    def __init__(self, size: int) -> None:
        """Begin with nothing said."""
        self._size = size
        self._first: dict[tuple[str, int], tuple[int, list[str]]] = {}
        self._times: Counter[tuple[int, str]] = Counter()
        self._num_said: Counter[tuple[str, int]] = Counter()

    def say(
        self, rank: int, what: str, lines: list[str]
    ) -> tuple[int, list[str]] | None:
        """Return the rank that said it first, and how, if it said otherwise."""
        self._times[rank, what] += 1
        place = what, self._times[rank, what]
        first = self._first.setdefault(place, (rank, lines))
        self._num_said[place] += 1
        if self._num_said[place] == self._size:
            del self._first[place], self._num_said[place]
        return None if first[1] == lines else first
