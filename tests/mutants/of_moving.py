# SPDX-License-Identifier: Apache-2.0
"""Bugs in how a state goes on in another world."""

from accelfn.checkpoint import arriving, elastic, moving
from tests.laws import test_with_world
from tests.mutants.mutant import Mutant

MOVED = test_with_world.test_a_state_that_is_moved_was_saved_and_loaded
HOLDS = test_with_world.test_a_rank_holds_what_it_goes_on_with
FAILS = test_with_world.test_a_rank_that_fails_is_told_of_on_all

MUTANTS = [
    Mutant(
        "L45: a state that is moved stays in the world that it was in",
        MOVED,
        moving._begun,
        "attrs.evolve(state.definition, world=world) → state.definition",
    ),
    Mutant(
        "L45: every rank sends what is the first one's to send",
        MOVED,
        moving._handed_over,
        "givers.index(world.rank)) → 0)",
    ),
    Mutant(
        "L45: a state that is moved shares tensors with the one that it was",
        MOVED,
        elastic.Source._read_file,
        "copy=not is_copied → copy=False",
    ),
    Mutant(
        "L45: newcomers hand over what they begin with",
        MOVED,
        moving.moved,
        "None if newcomer else contents_of → contents_of",
    ),
    Mutant(
        "L45: a copy that is left has the number that it had among others",
        test_with_world.test_a_copy_that_is_left_is_what_all_go_on_from,
        moving._numbered,
        'else copies.index(each["copy"]) → else each["copy"]',
    ),
    Mutant(
        "L43: a rank keeps all that is handed over",
        HOLDS,
        arriving._keep_some,
        "if (file, name) in wanted} → if True}",
    ),
    Mutant(
        "L43: what is in a mean already is kept until all of it is",
        HOLDS,
        arriving._passing,
        "del held[each][name] → pass",
    ),
    Mutant(
        "L43: what is cut anew is copied before",
        HOLDS,
        elastic.Source._resliced,
        "is_copied=True → is_copied=False",
    ),
    Mutant(
        "L54: a rank that can take nothing leaves the others waiting",
        test_with_world.test_who_can_take_nothing_lets_it_pass,
        arriving.Arrivals.to_the_end.__wrapped__,
        "except Exception: → except ZeroDivisionError:",
    ),
    Mutant(
        "L54: a rank that cannot take a state over is alone with it",
        FAILS,
        moving._all_do,
        "raise StateError(msg) → pass",
    ),
    Mutant(
        "L54: a world is taken for a part of another that it is not",
        test_with_world.test_what_a_rank_lacks_is_refused,
        moving._checked,
        "among.whole is not world.whole → False",
    ),
    Mutant(
        "L54: parts of a model that are gone are a manifest that has changed",
        test_with_world.test_parts_of_a_model_that_are_gone_are_missed,
        moving._handed_over,
        "except CheckpointCorruptError as error: → except ZeroDivisionError as error:",
    ),
    Mutant(
        "L55: who waits for a rank that does not move its state is not told in what",
        test_with_world.test_a_rank_that_does_not_call_is_missed,
        moving._all_do,
        'label=f"with_world: {what}" → label="with_world"',
    ),
]
