# SPDX-License-Identifier: Apache-2.0
"""Bugs of kinds that no law saw, found by planting some that were chosen from the code alone."""

from accelfn.checkpoint import arriving, background, commit, moving, retention, store
from accelfn.collectives import averages, in_few_bits, parts
from accelfn.launching import script
from accelfn.loop import profiling
from accelfn.placing import guests, hooks
from accelfn.weights import import_state
from accelfn.world import connection, regrouping, world
from tests.laws import (
    test_failing_saves,
    test_few_bits,
    test_import_state,
    test_pending,
    test_placing,
    test_regroup,
    test_whole_tensors,
    test_with_world,
)
from tests.mutants.mutant import Mutant
from tests.unit import (
    test_background,
    test_checkpoint,
    test_launch,
    test_profiling,
    test_regrouping,
    test_roll_call,
)
from tests.unit import test_import_state as test_import_state_

WAITING = test_regroup.test_who_has_asked_and_is_not_in_is_awaited
IN_BITS = test_few_bits.test_a_mean_is_of_what_was_sent
DUE = test_checkpoint.test_a_save_is_due_when_its_period_is_over
WHOLES = test_whole_tensors.test_parts_are_gathered_to_what_was_cut
HANDED = test_with_world.test_small_tensors_are_handed_over_together
NAMED = test_failing_saves.test_a_save_names_whose_error_it_was
BY_WEIGHT = test_pending.test_a_mean_is_by_weight

MUTANTS = [
    Mutant(
        "L45: one that is gone before it came in is awaited for ever",
        WAITING,
        regrouping.Words.take_in,
        'add("waiting", -1) → add("waiting", -1 if number is not None else 0)',
    ),
    Mutant(
        "L45: whoever is taken in is told of the first world",
        WAITING,
        regrouping.Words.take_in,
        "str(number) → str(1)",
    ),
    Mutant(
        "L6: after the first full bucket each tensor is sent alone",
        BY_WEIGHT,
        averages._buckets,
        "bucket, room = [], most → bucket = []",
    ),
    Mutant(
        "L47: a bucket holds twice what it may",
        BY_WEIGHT,
        averages._buckets,
        "if bucket and piece.numel() > room: → if bucket and piece.numel() > most + room:",
    ),
    Mutant(
        "L54: what rank 0 has begun stays where another rank could not begin",
        NAMED,
        commit.Save.agreed,
        'what != "begin" or failure is None → what != "begin"',
    ),
    Mutant(
        "L54: a checkpoint that cannot be read back is there all the same",
        NAMED,
        retention.Retention.after,
        "keeping.discard(self.directory, step) → pass",
    ),
    Mutant(
        "L54: what was written stays where the manifest could not be",
        NAMED,
        commit.Save.agreed,
        "disk.remove(self.partial) → commits or disk.remove(self.partial)",
    ),
    Mutant(
        "L42: an imported state has skipped the updates of the one that it was imported into",
        test_import_state.test_what_is_exported_for_torch_is_all_there,
        import_state._read,
        'fields["step"], fields["num_skipped"] = step, 0 → fields["step"] = step',
    ),
    Mutant(
        "ranks that waited for one in vain wait for another world the next time",
        test_regrouping.test_who_was_missed_is_met_when_it_comes,
        regrouping.Launched._next,
        "self._number -= 1 → pass",
        args={"times": 1},
    ),
    Mutant(
        "ranks that waited for one in vain have not come any more",
        test_regrouping.test_who_was_missed_is_met_when_it_comes,
        regrouping.Launched._next,
        "self._number -= 1 → self._number = 0 - self._number",
        args={"times": 3},
    ),
    Mutant(
        "shapes that were recorded to count operations cannot be looked at",
        test_profiling.test_what_is_recorded_beside_times,
        profiling.Profiler.__init__,
        ' or recorded["with_flops"] → ',
        args={"option": "with_flops"},
    ),
    Mutant(
        "stacks that were recorded cannot be looked at",
        test_profiling.test_what_is_recorded_beside_times,
        profiling.Profiler.__init__,
        'self._has_stacks = recorded["with_stack"] → self._has_stacks = recorded["with_modules"]',
        args={"option": "with_stack"},
    ),
    Mutant(
        "L3: where nobody has a weight, a mean in few bits is no number",
        IN_BITS,
        in_few_bits.summed,
        "torch.where(total > 0, weights / total, 0) → (weights / total)",
    ),
    Mutant(
        "L3: what the mean is rounded by is lost",
        IN_BITS,
        in_few_bits.summed,
        "(mean - decoded(again, bits, dtype))[0] → (mean - mean)[0]",
    ),
    Mutant(
        "L45: a user's own object is not there to take its state, where layouts are begun anew",
        test_with_world.test_a_state_that_is_moved_was_saved_and_loaded,
        moving._begun,
        "slots=own → slots={}",
    ),
    Mutant(
        "each rank saves by a clock of its own",
        DUE,
        store.CheckpointStore.due,
        'broadcast_object(over, state.world, label="store: due") → over',
    ),
    Mutant(
        "a period begins when the store was made, whatever was saved since",
        DUE,
        store.CheckpointStore.save,
        "self._last_saved = time.monotonic() → pass",
    ),
    Mutant(
        "L47: after a pass that broke off, parameters stay where they were computed with",
        test_placing.test_a_placed_model_computes_the_same,
        hooks.let_in,
        "after, always_call=True → after",
    ),
    Mutant(
        "L47: a parameter that was copied to be computed with stays so",
        test_placing.test_a_placed_model_computes_the_same,
        guests.Guest.go,
        "self.param.data = self.home → pass",
    ),
    Mutant(
        "a variable that a launch lends to its ranks is not put back",
        test_launch.test_process_is_left_as_it_was,
        script._environment,
        "os.environ.update(before) → pass",
    ),
    Mutant(
        "a variable that a launch lends to its ranks stays",
        test_launch.test_process_is_left_as_it_was,
        script._environment,
        "del os.environ[name] → pass",
    ),
    Mutant(
        "L47: after the first full call each part is gathered alone",
        WHOLES,
        parts._together,
        "size, taken = 0, [] → taken = []",
    ),
    Mutant(
        "L47: a call begins before the one before it is full",
        WHOLES,
        parts._together,
        "taken and size + nbytes > _MOST → taken and size + 2 * nbytes > _MOST",
    ),
    Mutant(
        "L45: after the first full call each tensor is handed over alone",
        HANDED,
        arriving._some_at_once,
        "some, num_bytes = {}, 0 → some = {}",
    ),
    Mutant(
        "L45: each tensor is handed over alone",
        HANDED,
        arriving._some_at_once,
        "if num_bytes >= _AT_ONCE: → if num_bytes:",
    ),
    Mutant(
        "a rank that was hurried long ago has no time to write",
        test_background.test_how_long_a_rank_waits,
        background.Talk._is_over,
        "max(begun, hurried) → hurried",
        args={"patience": 60.0, "hurried": 1.0},
    ),
    Mutant(
        "a rank that is hurried is not patient any more, but for all its time",
        test_background.test_how_long_a_rank_waits,
        background.Talk._is_over,
        "hurried is not None and now → hurried is not None and now - self.patience",
        args={"patience": 60.0, "hurried": 102.0},
    ),
    Mutant(
        "a store waits for minutes for a rank that is known to be lost",
        test_background.test_a_save_that_waits_for_one_that_is_lost_is_hurried,
        store.CheckpointStore.__exit__,
        "writing.hurry() → pass",
    ),
    Mutant(
        "an error is told in the world before, to ranks that have met anew",
        test_roll_call.test_who_met_anew_is_told_of_an_error,
        connection.Connection.fail,
        "if self.successor is not None: → if False:",
    ),
    Mutant(
        "a block that is broken off is left as if nothing was wrong",
        test_roll_call.test_who_met_anew_is_told_of_an_error,
        world.World.__exit__,
        "self.connection.fail(error) → self.connection.leave()",
    ),
    Mutant(
        "what is not imported is trained in both states",
        test_import_state_.test_what_is_not_imported_is_its_own,
        import_state._read,
        "fields_of(state.copy()) → fields_of(state)",
    ),
    Mutant(
        "each rank restores the newest state that it sees itself",
        test_checkpoint.test_all_ranks_restore_what_rank_0_sees,
        store.CheckpointStore._steps_on_all,
        'broadcast_object(found, world, label="store: restore") → self._listed(step)',
        args={"step": None},
    ),
    Mutant(
        "a rank restores the step that was asked for where it sees it, or refuses alone",
        test_checkpoint.test_all_ranks_restore_what_rank_0_sees,
        store.CheckpointStore._steps_on_all,
        "step is not None and step not in steps: → step is not None and step not in self.steps:",
        args={"step": 2},
    ),
]
