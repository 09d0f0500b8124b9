# SPDX-License-Identifier: Apache-2.0
"""`Members`: which ranks of a simulated world make a group, and under which name."""

import attrs


@attrs.frozen(cache_hash=True)
class Members:
    """Ranks whose calls meet one another alone.

    Attributes:
        name: of the group, as "tp"; empty where it is the world's own.
        ranks: of the run, in ascending order, which is the group's.
        generation: which of the worlds that an elastic run has had they are of.
    """

    name: str
    ranks: tuple[int, ...]
    generation: int = 0

    def place_of(self, rank: int) -> int:
        """Return which of the group's ranks a rank of the world is."""
        return self.ranks.index(rank)

    def __str__(self) -> str:
        """Say who they are, where they are not all."""
        if not self.name:
            return ""
        listed = ", ".join(map(str, self.ranks))
        return f"{self.name} of ranks {listed}"
