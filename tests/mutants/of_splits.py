# SPDX-License-Identifier: Apache-2.0
"""Bugs in parts of a world: who is in which, who talks to whom, and what is refused."""

from accelfn.testing.simulation import ranks
from accelfn.world import parts, world
from tests.laws import test_parts as laws
from tests.mutants.mutant import Mutant
from tests.unit import test_parts as unit

CALLS = laws.test_calls_in_parts_are_of_their_ranks
TWICE = laws.test_reduced_within_and_across_is_reduced
TRAINS = laws.test_a_part_trains_as_a_world_of_its_size
REFUSED = unit.test_parts_that_cannot_be_are_refused

MUTANTS = [
    Mutant(
        "L49: parts are of ranks that stand apart",
        TWICE,
        parts.of_size,
        "tuple(range(at, at + size)) for at in range(0, num_ranks, size)"
        " → tuple(range(at, num_ranks, num_ranks // size)) for at in range(num_ranks // size)",
    ),
    Mutant(
        "L49: the last machine has the ranks of all",
        CALLS,
        parts.of_nodes,
        "found.setdefault(node, []) → found.setdefault(node % 2, [])",
    ),
    Mutant(
        "L49: ranks across machines are numbered in the order of machines",
        CALLS,
        parts.across,
        "tuple(sorted(each)) → each",
    ),
    Mutant(
        "L49: two parts of one size have one group",
        CALLS,
        ranks._Room.part,
        "name=within, ranks=ranks) → name='')",
    ),
    Mutant(
        "L49: whoever has split by one size has split by any",
        CALLS,
        parts.open_part,
        'written.removeprefix("World.") → "part"',
    ),
    Mutant(
        "L49: what is across parts is within them",
        TWICE,
        world.World._parted,
        'call == "World.across" → False',
    ),
    Mutant(
        "L35: a rank stands in its part where it stands in the world",
        TRAINS,
        world.World._part,
        "rank=ranks.index(self.rank) → rank=0",
    ),
    Mutant(
        "parts of a part are opened by some of the ranks",
        unit.test_the_whole_is_split_alone,
        world.World._parted,
        "self._whole is not None → False",
    ),
    Mutant(
        "groups are opened at each call",
        unit.test_parts_are_opened_once,
        parts.open_part,
        "if (name,) not in connection.parts: → if True:",
    ),
    Mutant(
        "a part keeps the axes of the whole",
        unit.test_a_part_has_no_axes_and_knows_the_whole,
        world.World._parted,
        "axes={} → axes=self.axes if size is None else {'dp_shard': len(mine)}",
    ),
    Mutant(
        "a size that does not divide the ranks leaves some out",
        REFUSED,
        parts.check_given,
        "num_ranks % size: → False:",
        args={"way": "split", "case": "a size that does not divide"},
    ),
]
