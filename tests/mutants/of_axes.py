# SPDX-License-Identifier: Apache-2.0
"""Bugs in the axes of a world: who stands where, who talks to whom, and what torch is told."""

import inspect

from accelfn.world import axes, connection, mesh, world
from tests.laws import test_axes as laws
from tests.mutants.mutant import Mutant
from tests.simulation import test_groups as groups
from tests.unit import test_axes as unit

CALLS = laws.test_calls_along_axes_are_of_the_ranks_that_differ_in_them
PARTS = laws.test_parts_of_a_world_divide_it
_ATTRS = inspect.getclosurevars(world.World.__getattr__).nonlocals["inner"]
CACHED = _ATTRS.__globals__["cached_properties"]
"""Where attrs keeps the functions of what is computed once."""
REFUSED = unit.test_axes_that_cannot_be_are_refused

MUTANTS = [
    Mutant(
        "L49: the first axis is the densest",
        CALLS,
        axes.place,
        "reversed(tuple(axes.items())) → axes.items()",
    ),
    Mutant(
        "L49: a group along an axis is of the ranks that stand alike on it",
        CALLS,
        axes.rows,
        "if name not in names → if name in names",
    ),
    Mutant(
        "L49: axes that are named in another order are other ones",
        CALLS,
        axes.long,
        "for name in axes if name in names and axes[name] > 1"
        " → for name in names if axes.get(name, 1) > 1",
    ),
    Mutant(
        "L35: every rank is the first of its group",
        PARTS,
        world.World._part,
        "rank=ranks.index(self.rank) → rank=0",
    ),
    Mutant(
        "a part of a world has the group of all",
        groups.test_the_log_names_a_call_s_group,
        world.World.along,
        "self._part(ranks, part, → self._part("
        "ranks, self.connection if len(ranks) > 1 else part,",
    ),
    Mutant(
        "L35: a part of a world forgets along which axes it goes",
        PARTS,
        world.World.along,
        "axes = {name: self.axes[name] for name in chosen} → axes = {}",
    ),
    Mutant(
        "a world without axes has all its ranks along any",
        unit.test_an_axis_that_is_not_there_is_of_one_rank,
        world.World.along,
        "chosen or self.size == 1 → True",
    ),
    Mutant(
        "L35: of a part of a part, the whole is the part",
        PARTS,
        world.World._part,
        "whole=self.whole → whole=self",
    ),
    Mutant(
        "L35: the parts of a part have no groups",
        PARTS,
        connection.Connection.add_part,
        "part.parts = self.parts → pass",
    ),
    Mutant(
        "L35: ranks along cp take other samples",
        PARTS,
        CACHED["batch"],
        "arithmetic.BATCH → arithmetic.LOSS",
    ),
    Mutant(
        "L35: ranks along cp have losses of their own",
        PARTS,
        CACHED["loss"],
        "arithmetic.LOSS → arithmetic.BATCH",
    ),
    Mutant(
        "L35: without axes each rank takes all samples",
        PARTS,
        CACHED["batch"],
        "if self.axes else self → if True else self",
    ),
    Mutant(
        "L35: without axes each rank has a loss of its own",
        PARTS,
        CACHED["loss"],
        "if self.axes else self → if True else self",
    ),
    Mutant(
        "a part of a closed world goes on",
        unit.test_a_part_of_a_closed_world_is_closed,
        connection.Connection.close,
        "if not part.is_closed: → if False:",
    ),
    Mutant(
        "L49: a mesh along an axis is of the first ranks",
        CALLS,
        mesh.mesh_of,
        "torch.tensor(ranks) → torch.arange(len(ranks))",
    ),
    Mutant(
        "L49: the mesh of two axes has the first one's group for both",
        CALLS,
        mesh.mesh_of,
        "connection.parts.get((name,), connection)"
        " → connection.parts.get((names[0],), connection)",
    ),
    Mutant(
        "what is left for -1 is the product of the other axes",
        unit.test_what_is_left_is_filled_in,
        axes._resolved,
        "sizes[free[0]] = size // known → sizes[free[0]] = known",
    ),
    Mutant(
        "axes are in the order in which somebody wrote them",
        unit.test_what_is_left_is_filled_in,
        axes._resolved,
        "for name in AXES if name in sizes} → for name in sizes}",
    ),
    Mutant(
        "ranks that no axis has are left over",
        REFUSED,
        axes._resolved,
        "if math.prod(sizes.values()) != size: → if math.prod(sizes.values()) > size:",
        args={"case": "a product"},
    ),
    Mutant(
        "axes of more ranks than there are are taken",
        REFUSED,
        axes._resolved,
        "if math.prod(sizes.values()) != size: → if math.prod(sizes.values()) < size:",
        args={"case": "too large a product"},
    ),
    Mutant(
        "the first -1 is what is left, another is -1 ranks",
        REFUSED,
        axes._resolved,
        "if len(free) > 1: → if len(free) > 2:",
        args={"case": "two are left"},
    ),
    Mutant(
        "an axis of True ranks is one of 1",
        REFUSED,
        axes._check,
        "not is_integer(extent, 1) → extent < 1",
        args={"case": "a truth"},
    ),
    Mutant(
        "an axis of one pipeline stage is refused",
        unit.test_what_is_left_is_filled_in,
        axes._check,
        'if name == "pp" and extent == 1: → if False:',
    ),
    Mutant(
        "groups are opened for single axes only",
        unit.test_groups_are_opened_for_neighbours,
        axes.joined,
        "range(begin + 1, len(names) + 1) → range(begin + 1, begin + 2)",
    ),
    Mutant(
        "groups are opened for axes of one rank",
        unit.test_groups_are_opened_for_neighbours,
        axes.long,
        "axes[name] > 1 → axes[name] >= 1",
    ),
    Mutant(
        "axes between which another stands have a world of two without a group",
        unit.test_axes_between_which_another_stands_have_no_group,
        world.World.along,
        "if part is None and len(ranks) > 1: → if False:",
    ),
    Mutant(
        "what is no axis is an axis of one rank",
        unit.test_axes_between_which_another_stands_have_no_group,
        world.World.along,
        'arithmetic.check_name("World.along", name) → pass',
    ),
    Mutant(
        "a record with axes and one group for all of them is made",
        unit.test_a_world_by_hand_has_no_axes,
        world.World.__attrs_post_init__,
        "if set(arithmetic.joined(sizes)) - self.connection.parts.keys(): → if False:",
    ),
]
