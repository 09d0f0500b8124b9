# SPDX-License-Identifier: Apache-2.0
"""Bugs in what a whole call means: one option beside the others, one word of several."""

from accelfn.checkpoint import partial, retention
from accelfn.data import cut
from accelfn.launching import failures, settings
from accelfn.world import slurm
from tests.laws import (
    test_data_calls,
    test_launch_calls,
    test_load_calls,
    test_store_calls,
)
from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        name="short batches are dropped as of the epoch",
        says="from a cursor between two batches the last samples come in no batch, or twice",
        law="L34",
        test=test_data_calls.test_any_data_are_read_as_a_list_is_cut,
        place=cut.EvenCut.end,
        old="start + left - left % self.batch_size",
        new="self.num_samples - self.num_samples % self.batch_size",
    ),
    Mutant(
        name="a step behind the newest is not kept",
        says="a run that went back loses what it has just saved",
        law="L53",
        test=test_store_calls.test_a_store_is_what_was_saved_and_kept,
        place=retention.Retention.after,
        old="{step, *self._kept()}",
        new="self._kept()",
    ),
    Mutant(
        name="what is missing is let be as extra is",
        says="a head that a checkpoint lacks is passed over though nobody allowed it",
        law="L41",
        test=test_load_calls.test_a_partial_load_is_what_was_asked_for,
        place=partial.Wanted.refuses,
        old='found.missing and self.missing == "error"',
        new='found.missing and self.extra == "error"',
    ),
    Mutant(
        name="the file comes before the command line",
        says="what is said at a launch changes nothing where a file says something else",
        law="L55",
        test=test_launch_calls.test_a_launch_is_what_its_settings_say,
        place=settings.Settings.of.__func__,
        old="if text is not None:",
        new="if text is not None and name not in written:",
    ),
    Mutant(
        name="all runs have one name",
        says="two elastic runs that meet at one address become one",
        law="L55",
        test=test_launch_calls.test_machines_meet_as_they_were_told,
        place=settings.Settings.machines,
        old='run_id=self["rdzv_id"]',
        new='run_id="accelfn"',
    ),
    Mutant(
        name="every machine has as many tasks as the first",
        says="ranks of a smaller machine take GPUs that it has not",
        law="L55",
        test=test_launch_calls.test_a_rank_is_where_its_launcher_says,
        place=slurm.place_of,
        old="local_size=per_node[node_rank]",
        new="local_size=per_node[0]",
    ),
    Mutant(
        name="who waited is blamed before who was stopped",
        says="the report of a run begins with a consequence",
        law="L55",
        test=test_launch_calls.test_the_cause_of_a_failure_comes_first,
        place=failures.by_cause,
        old="return ended_by_us, failure.lost_peer, is_blamed, failure.at",
        new="return ended_by_us, is_blamed, failure.lost_peer, failure.at",
    ),
]
