# SPDX-License-Identifier: Apache-2.0
"""Bugs in simulated groups: of which ranks they are, what torch knows of them, what is told."""

from accelfn.testing.simulation import (
    calls,
    dtensors,
    entries,
    group,
    meetings,
    members,
    ranks,
    registry,
)
from tests.laws import test_axes as laws
from tests.mutants.mutant import Mutant
from tests.simulation import test_groups as unit

ALONG = laws.test_calls_along_axes_are_of_the_ranks_that_differ_in_them

MUTANTS = [
    Mutant(
        "ranks of a group are counted from its last one",
        unit.test_roots_and_peers_are_counted_along_the_axis,
        members.Members.place_of,
        "self.ranks.index(rank) → len(self.ranks) - 1 - self.ranks.index(rank)",
    ),
    Mutant(
        "L49: calls along different axes meet, if they come in the same order",
        ALONG,
        meetings.Meetings.join,
        "place = self._num_joined[call.rank, call.group], call.group"
        " → place = self._num_joined[call.rank, call.group], None",
    ),
    Mutant(
        "L49: calls along an axis are counted with those of other axes",
        ALONG,
        meetings.Meetings.join,
        "place = self._num_joined[call.rank, call.group], call.group"
        " → place = sum(n for (r, _), n in self._num_joined.items() if r == call.rank),"
        " call.group",
    ),
    Mutant(
        "a message along one axis is received along another",
        unit.test_messages_of_one_pair_of_ranks_meet_in_their_groups,
        meetings._is_message,
        "and send.group == recv.group → and True",
    ),
    Mutant(
        "L49: a root is the first rank of its group, whoever was named",
        ALONG,
        group.SimulatedGroup._call,
        "self.members.ranks[root] → self.members.ranks[0]",
    ),
    Mutant(
        "a peer is the rank of the world with that number",
        unit.test_roots_and_peers_are_counted_along_the_axis,
        group.SimulatedGroup._call,
        "None if peer is None else self.members.ranks[peer] → peer",
    ),
    Mutant(
        "L49: torch takes a group's ranks for the first ones of the world",
        ALONG,
        registry.Registry.add,
        "self.numbers.get(rank, rank): place for place, rank in enumerate(ranks)"
        " → rank: rank for rank in range(len(ranks))",
    ),
    Mutant(
        "the log does not say in which group a call was",
        unit.test_the_log_names_a_call_s_group,
        entries.entry_of,
        "group=first.group.name → group=''",
    ),
    Mutant(
        "the log says the numbers of ranks in their group",
        unit.test_the_log_names_a_call_s_group,
        entries.entry_of,
        "tuple(call.rank for call in in_order) → tuple(range(len(calls)))",
    ),
    Mutant(
        "a line of the log says nothing of the group",
        unit.test_the_log_names_a_call_s_group,
        entries.Entry.__str__,
        "if self.group else → if False else",
    ),
    Mutant(
        "a call along an axis says not which update it is of",
        unit.test_a_call_along_an_axis_says_what_it_is_for,
        ranks._Room.among,
        "activity or self.group.activity → Activity()",
    ),
    Mutant(
        "a table says nothing of groups",
        unit.test_a_mismatch_shows_the_group,
        calls.Call.row,
        "if self.group.name else None → if False else None",
    ),
    Mutant(
        "a group's ranks are listed by their numbers in it",
        unit.test_a_mismatch_shows_the_group,
        members.Members.__str__,
        "map(str, self.ranks) → map(str, range(len(self.ranks)))",
    ),
    Mutant(
        "plans of redistribution keep meshes alive",
        unit.test_nothing_is_left_of_meshes,
        dtensors.forget,
        "_redistribute._gen_transform_infos.cache_clear() → pass",
    ),
    Mutant(
        "torch forgets nothing when a world of meshes ends",
        unit.test_nothing_is_left_of_meshes,
        registry.Registry.close,
        "if any(forgotten): → if False:",
    ),
]
