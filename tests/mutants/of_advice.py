# SPDX-License-Identifier: Apache-2.0
"""Bugs in what is said of likely mistakes."""

from accelfn import running
from accelfn.batches import Batches
from tests.laws import test_loops_of_nothing
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
        place=running.run,
        old="state.cursor.epoch >= num_epochs",
        new="False",
    ),
]
