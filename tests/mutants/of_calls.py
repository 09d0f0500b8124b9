# SPDX-License-Identifier: Apache-2.0
"""Bugs in what a whole call means: one option beside the others, one word of several."""

from accelfn.checkpoint import partial, retention
from accelfn.data import cut, mixed
from accelfn.engine import agreement
from accelfn.launching import failures, settings
from accelfn.loop import control, observe, run
from accelfn.state import shared_draws
from accelfn.transforms import ema, local_sgd
from accelfn.world import slurm
from tests.laws import (
    test_data_calls,
    test_definitions,
    test_launch_calls,
    test_load_calls,
    test_parameters,
    test_plateau,
    test_ranks_data,
    test_replicas,
    test_running,
    test_shared_draws,
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
    Mutant(
        name="tuples in slots are not compared",
        says="ranks that differ in a tensor of a tuple pass for replicas",
        law="L2",
        test=test_replicas.test_any_leaf_of_a_slot_is_compared,
        place=control._rows,
        old="(list, tuple)",
        new="list",
    ),
    Mutant(
        name="a loaded run draws by the seed that was here before",
        says="a run that is resumed in a state of another seed is another run",
        law="L50",
        test=test_shared_draws.test_what_is_loaded_draws_by_its_own_seed,
        place=shared_draws.shared_draws,
        old="known is None or known[0] != state.seed",
        new="known is None",
    ),
    Mutant(
        name="a mix is as pure as its purest part",
        says="augmentation draws from the process's generators, and moves them",
        law="L50",
        test=test_ranks_data.test_draws_beside_data_that_draw_nothing,
        place=mixed.Joined.is_pure,
        old="all(part.is_pure",
        new="any(part.is_pure",
    ),
    Mutant(
        name="what was frozen again is evaluated unaveraged",
        says="ranks that trained apart evaluate another model each",
        law="L2",
        test=test_parameters.test_what_is_frozen_and_thawed_is_averaged_and_evaluated,
        place=local_sgd.local_sgd.eval_params,
        old="skeleton.once_trained",
        new="skeleton.trainable",
    ),
    Mutant(
        name="an average stops at what is frozen",
        says="the average stays behind a parameter that does not move any more",
        law="L28",
        test=test_parameters.test_what_is_frozen_and_thawed_is_averaged_and_evaluated,
        place=ema.ema.after_update,
        old="if _averages(param)",
        new="if _averages(param) and name in state.definition.skeleton.trainable",
    ),
    Mutant(
        name="an epoch that ends with a skip is not evaluated",
        says="a skipped update at an epoch's end costs the epoch's numbers",
        law="L54",
        test=test_running.test_it_is_the_loop,
        place=run._Actions.take,
        old="due = batch.ends_epoch",
        new="due = updated and batch.ends_epoch",
    ),
    Mutant(
        name="observed values are compared under an engine alone",
        says="ranks whose sums a transform takes go by rates of their own",
        law="L2",
        test=test_plateau.test_ranks_observe_the_same,
        place=observe.observe,
        old='setup.having("engine") or setup.having("reduce")',
        new='setup.having("engine")',
    ),
    Mutant(
        name="rates that are tensors are compared by shape",
        says="ranks with other rates train together",
        law="L2",
        test=test_definitions.test_any_two_that_differ_are_told_apart,
        args={"part": "optimizer"},
        place=agreement._plain,
        old="value.tolist() if value.numel() == 1 else tuple(value.shape)",
        new="tuple(value.shape)",
    ),
]
