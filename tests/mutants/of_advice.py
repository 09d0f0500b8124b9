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
        name="loops of nothing are silent",
        says="a loop over batches that has none does nothing, and nothing is said",
        law="L39",
        test=NOTHING,
        place=SAYS,
        old="start.epoch < epochs or",
        new="True or",
    ),
    Mutant(
        name="a job that was done is blamed",
        says="a finished run that is started again is told that it does nothing",
        law="L39",
        test=NOTHING,
        place=SAYS,
        old="done = self.is_loaded and",
        new="done = False and",
    ),
    Mutant(
        name="what is loaded is done",
        says="a loaded run beyond the epochs that are asked for is taken for complete",
        law="L39",
        test=NOTHING,
        place=SAYS,
        old="start == Cursor(epochs)",
        new="start",
    ),
    Mutant(
        name="only what lies beyond is told",
        says="a loop of epochs that trains one epoch goes unnoticed",
        law="L39",
        test=test_loops_of_nothing.test_loops_of_epochs_are_told_apart,
        place=SAYS,
        old="start.epoch < epochs or",
        new="start.epoch <= epochs or",
    ),
    Mutant(
        name="a run that is over is blamed",
        says="af.run of a finished run is told that it does nothing",
        law="L39",
        test=test_loops_of_nothing.test_a_run_that_is_over_is_let_be,
        place=run.run,
        old="state.cursor.epoch >= num_epochs",
        new="False",
    ),
    Mutant(
        name="ranks that do the same work are silent",
        says="what data ranks have that share none is not compared",
        law="L6",
        test=test_shared_work.test_ranks_that_do_the_same_work_are_told,
        place=agreement.check_definitions,
        old="same = are_alike(data, data.looks, state.world)",
        new="same = False",
    ),
    Mutant(
        name="data of each rank's own are blamed",
        says="ranks that have other data are told that they do the same work",
        law="L6",
        test=test_shared_work.test_ranks_that_do_the_same_work_are_told,
        place=first_batch._unshared,
        old="if not state.definition.cache.has_same_data:",
        new="if False:",
    ),
    Mutant(
        name="plain values are silent",
        says="a loader's batches under shard_data are trained on by all ranks, unsaid",
        law="L6",
        test=test_shared_work.test_values_that_are_not_cut_are_told,
        place=first_batch.check_first_batch,
        old="_of_value(state, batch) if is_sharded else None",
        new="None",
    ),
    Mutant(
        name="ranks' own values are blamed",
        says="values that differ by rank are taken for the same",
        law="L6",
        test=test_shared_work.test_values_that_are_not_cut_are_told,
        place=first_batch._of_value,
        old="if not _is_alike(value, state):",
        new="if False:",
    ),
    Mutant(
        name="whole batches pass for parts",
        says="a batch of a state that was not sharded is taken without a word",
        law="L6",
        test=test_shared_work.test_batches_that_another_state_cut_are_told,
        place=first_batch._is_whole,
        old="return counted == batch.num_samples > 1",
        new="return False",
    ),
    Mutant(
        name="one sample is blamed",
        says="a batch of one sample, which one rank alone can have, is told as whole",
        law="L6",
        test=test_shared_work.test_batches_that_another_state_cut_are_told,
        place=first_batch._is_whole,
        old="== batch.num_samples > 1",
        new="== batch.num_samples",
    ),
]
