# SPDX-License-Identifier: Apache-2.0
"""Bugs in what is said of likely mistakes."""

from accelfn.engine import agreement, first_batch
from accelfn.loop import run
from accelfn.loop.batches import Batches
from tests.laws import test_loops_of_nothing, test_shared_work
from tests.mutants.mutant import Mutant

NOTHING = test_loops_of_nothing.test_a_loop_that_does_nothing_says_so
SAYS = Batches._say_none_is_left  # pyright: ignore[reportPrivateUsage]

MUTANTS = [
    Mutant(
        "L39: a loop over batches that has none does nothing, and nothing is said",
        NOTHING,
        SAYS,
        "start.epoch < epochs or → True or",
    ),
    Mutant(
        "L39: a finished run that is started again is told that it does nothing",
        NOTHING,
        SAYS,
        "done = self.is_loaded and → done = False and",
    ),
    Mutant(
        "L39: a loaded run beyond the epochs that are asked for is taken for complete",
        NOTHING,
        SAYS,
        "start == Cursor(epochs) → start",
    ),
    Mutant(
        "L39: a loop of epochs that trains one epoch goes unnoticed",
        test_loops_of_nothing.test_loops_of_epochs_are_told_apart,
        SAYS,
        "start.epoch < epochs or → start.epoch <= epochs or",
    ),
    Mutant(
        "L39: af.run of a finished run is told that it does nothing",
        test_loops_of_nothing.test_a_run_that_is_over_is_let_be,
        run.run,
        "state.cursor.epoch >= num_epochs → False",
    ),
    Mutant(
        "L6: what data ranks have that share none is not compared",
        test_shared_work.test_ranks_that_do_the_same_work_are_told,
        agreement.check_definitions,
        "same = are_alike(data, data.looks, state.world) → same = False",
    ),
    Mutant(
        "L6: ranks that have other data are told that they do the same work",
        test_shared_work.test_ranks_that_do_the_same_work_are_told,
        first_batch._unshared,
        "if not state.definition.cache.has_same_data: → if False:",
    ),
    Mutant(
        "L6: a loader's batches under shard_data are trained on by all ranks, unsaid",
        test_shared_work.test_values_that_are_not_cut_are_told,
        first_batch.check_first_batch,
        "_of_value(state, batch) if is_sharded else None → None",
    ),
    Mutant(
        "L6: values in place of batches of the state's data are told of no more than the first",
        test_shared_work.test_values_that_are_not_cut_are_told,
        first_batch.warn_of_values,
        "all(map(is_, before, cache.last_value)) → True",
    ),
    Mutant(
        "L6: values that differ by rank are taken for the same",
        test_shared_work.test_values_that_are_not_cut_are_told,
        first_batch._of_value,
        "or not _is_alike(value, state): → or False:",
    ),
    Mutant(
        "L6: a batch of a state that was not sharded is taken without a word",
        test_shared_work.test_batches_that_another_state_cut_are_told,
        first_batch._is_whole,
        "return counted == batch.num_samples > 1 → return False",
    ),
    Mutant(
        "L6: a batch of one sample, which one rank alone can have, is told as whole",
        test_shared_work.test_batches_that_another_state_cut_are_told,
        first_batch._is_whole,
        "== batch.num_samples > 1 → == batch.num_samples",
    ),
]
