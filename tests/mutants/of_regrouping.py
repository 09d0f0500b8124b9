# SPDX-License-Identifier: Apache-2.0
"""Bugs in how ranks that are left go on, and others come in."""

from accelfn.checkpoint import background, moving, regrouping, store, under_way
from accelfn.launching.settings import Settings
from accelfn.testing.simulation import ranks
from accelfn.testing.simulation.exchange import Exchange
from accelfn.testing.simulation.gatherings import Gatherings
from accelfn.testing.simulation.plan import Plan
from accelfn.world import connection, watched, world
from accelfn.world import regrouping as regrouping_of_processes
from tests.laws import (
    test_elastic_checkpoints,
    test_launch_calls,
    test_regroup,
    test_regroup_errors,
)
from tests.mutants.mutant import Mutant
from tests.unit import test_background, test_store_elastic
from tests.unit import test_regrouping as of_processes

REST = test_regroup.test_the_rest_go_on_from_the_last_average
BACK = test_regroup.test_a_rank_that_comes_back_comes_in_at_an_average
OWN = test_regroup.test_what_is_each_rank_s_own_it_keeps
REFUSED = test_regroup_errors.test_what_cannot_be_regrouped_is_refused
FEWER = test_regroup_errors.test_fewer_than_may_go_on_do_not

SAVES = test_elastic_checkpoints.test_whoever_is_there_saves_and_goes_on

MUTANTS = [
    Mutant(
        "L45: ranks that met anew ask those of the old world whether a save has ended",
        SAVES,
        under_way.UnderWay.is_of_others,
        "self.world is None or self.world.connection is not now.connection → False",
    ),
    Mutant(
        "L45: who was rank 0 keeps the directory when another is",
        SAVES,
        store.CheckpointStore._ended,
        "if not now.is_main: → if False:",
    ),
    Mutant(
        "a save that was lost with a rank is an error of the next",
        test_store_elastic.test_a_save_that_is_lost_with_a_rank_is_said_and_no_error,
        under_way.UnderWay.left,
        "if isinstance(error, CheckpointWriteError): → if True:",
    ),
    Mutant(
        "L45: torch knows who came in by the rank that it was alone",
        SAVES,
        ranks._Room.meet,
        "self._registry.begin(room.group) → pass",
    ),
    Mutant(
        "L45: a simulated rank that crashed holds its directory",
        SAVES,
        ranks._let_go,
        "traceback.clear_frames(error.__traceback__) → pass",
    ),
    Mutant(
        "L45: what a simulated rank was saving as it crashed holds its directory",
        SAVES,
        ranks._let_go,
        "background.give_up() → False",
    ),
    Mutant(
        "L45: with no checkpoint to go on with, ranks go on with a state of no numbers",
        test_elastic_checkpoints.test_with_nothing_to_go_on_with_what_is_lost_is_lost,
        moving._restored,
        "if found is fresh or → if",
    ),
    Mutant(
        "L45: what is given in place of a function that restores is not named",
        test_elastic_checkpoints.test_what_restores_is_a_function_of_a_state,
        regrouping._check,
        "restore if callable(restore) else type(restore).__name__ → None",
        args={"restore": "checkpoints", "said": "restore=str"},
    ),
    Mutant(
        "a rank that speaks as the patience of another ends is taken for silent",
        test_background.test_who_speaks_last_as_patience_ends_has_spoken,
        background.Talk.__call__,
        "if absent and (gone or self._is_over(begun)): → if gone or self._is_over(begun):",
    ),
    Mutant(
        "one that is gone as torch joins the ranks is an error, and no reason to meet again",
        of_processes.test_one_that_is_gone_before_it_has_opened_is_done_without,
        regrouping_of_processes.Launched._opened,
        "if not self._loses_one(names): → if True:",
    ),
    Mutant(
        "ranks that live and cannot be joined meet again, and again",
        of_processes.test_who_live_and_cannot_be_joined_are_told_so,
        regrouping_of_processes.Launched._loses_one,
        "return False → return True",
    ),
    Mutant(
        "what is waited for at a store is waited for until a timeout, whoever is gone",
        of_processes.test_a_watched_store_tells_what_was_waited_for,
        watched.WatchedStore.wait,
        "if self._is_one_gone(): → if False:",
    ),
    Mutant(
        "L45: those that are left go on as newcomers, from where they began",
        REST,
        regrouping.regroup,
        "behind = newcomer or state.step < newest → behind = state.step > 0",
    ),
    Mutant(
        "L45: ranks have the numbers in the next world that they had",
        test_regroup_errors.test_the_old_world_says_where_the_ranks_are,
        ranks._Room.meet,
        "followed(room.group.rank(), → followed(world.rank % room.group.size(),",
    ),
    Mutant(
        "L54: calls that wait for a rank that is gone are left where they met",
        REST,
        Exchange.ended,
        "self._meetings.forget(self.gatherings.is_broken) → pass",
    ),
    Mutant(
        "L45: a rank that comes back hands over what it begins with",
        BACK,
        regrouping.regroup,
        "behind = newcomer or state.step → behind = state.step",
    ),
    Mutant(
        "L45: a rank that waits comes in where another is gone, and not at an average",
        BACK,
        regrouping._met,
        "if not awaited: → if True:",
    ),
    Mutant(
        "L49: what is in flight as ranks meet may be lost with one that is gone",
        test_regroup.test_where_all_are_there_nothing_changes,
        regrouping.regroup,
        "tree.tree_leaves(state.slots) → pass",
    ),
    Mutant(
        "L36: those that are left take the shares that they had",
        test_regroup.test_each_epoch_is_covered_once,
        moving._begun,
        "attrs.evolve(state.definition, world=world) → state.definition",
    ),
    Mutant(
        "L45: ranks that are behind keep what they have",
        test_regroup.test_the_newest_state_is_what_all_go_on_from,
        regrouping.regroup,
        "max((int(each) → min((int(each)",
    ),
    Mutant(
        "L43: ranks make another world though all are there",
        test_regroup.test_where_all_are_there_nothing_changes,
        regrouping._met,
        "if not awaited: → if False:",
    ),
    Mutant(
        "L54: one rank fewer goes on than may",
        FEWER,
        Gatherings.lose,
        "len(left) < self._least → len(left) < self._least - 1",
    ),
    Mutant(
        "L54: a run that is not elastic goes on without a rank",
        FEWER,
        Gatherings.__init__,
        "size if least is None else least → 1 if least is None else least",
    ),
    Mutant(
        "L54: a rank that raises is as one that is killed",
        test_regroup_errors.test_a_rank_that_raises_ends_the_run,
        Exchange.ended,
        "if crashed and self.gatherings.lose(rank, how): →"
        " if self.gatherings.lose(rank, how):",
    ),
    Mutant(
        "L54: a state in a part of a world is regrouped",
        REFUSED,
        regrouping._regrouping_of,
        "if world.whole is not world: → if False:",
    ),
    Mutant(
        "L54: a world that nobody can make anew is not refused by name",
        REFUSED,
        regrouping._regrouping_of,
        "launch --elastic MIN:MAX → launch",
    ),
    Mutant(
        "L54: a rank is to come back where nobody goes on without it",
        REFUSED,
        Plan._check_faults,
        "fault.returns is not None and not elastic → False",
    ),
    Mutant(
        "L54: of a part that is gone with its rank a manifest is said to have changed",
        test_regroup_errors.test_a_part_of_a_model_that_is_gone_is_missed,
        moving._handed_over,
        "except CheckpointCorruptError as error: → except ZeroDivisionError as error:",
    ),
    Mutant(
        "L54: a return that nobody has reached is left out in silence",
        test_regroup_errors.test_a_return_that_is_not_reached_is_an_error,
        Gatherings.expect,
        "self._coming[rank] = update → self._coming[rank] = 4",
    ),
    Mutant(
        "L54: a rank that comes back in vain is left out in silence",
        test_regroup_errors.test_whoever_comes_back_in_vain_is_told_of,
        Gatherings.formed,
        "self._late.add(rank) → pass",
    ),
    Mutant(
        "L45: ranks that are left take the mean of what was each one's own",
        OWN,
        regrouping.regroup,
        "newcomer=behind, → newcomer=behind or met.rank > 0,",
    ),
    Mutant(
        "L54: a rank that has not come in trains alone",
        test_regroup_errors.test_who_has_not_come_in_does_not_train_alone,
        connection._refuse_alone,
        "raise WorldError(msg) → pass",
    ),
    Mutant(
        "L54: whoever kept the old world is not told where its ranks are",
        test_regroup_errors.test_the_old_world_says_where_the_ranks_are,
        world.World.followed,
        "self.connection.successor = met → pass",
    ),
    Mutant(
        "L54: what repeats a run does not say that it was elastic",
        test_regroup_errors.test_a_failed_run_says_how_it_was_elastic,
        Plan.__str__,
        "if self.elastic is not None: → if False:",
    ),
    Mutant(
        "L54: ranks that come and go are launched beside those that start again",
        test_launch_calls.test_a_launch_is_what_its_settings_say,
        Settings._check_elastic,
        '"max_restarts", → ',
    ),
]
