# SPDX-License-Identifier: Apache-2.0
"""Bugs in what a whole call means: one option beside the others, one word of several."""

from accelfn.checkpoint import partial, retention
from accelfn.checkpoint import store as checkpoint_store
from accelfn.collectives import replicas
from accelfn.data import cut, mixed
from accelfn.engine import agreement
from accelfn.launching import failures, settings
from accelfn.loop import observe, run
from accelfn.state import alike, shared_draws
from accelfn.transforms import ema, local_sgd
from accelfn.world import slurm
from tests.laws import (
    test_causes,
    test_data_calls,
    test_definitions,
    test_launch_calls,
    test_launched_places,
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
        "L34: from a cursor between two batches the last samples come in no batch, or twice",
        test_data_calls.test_any_data_are_read_as_a_list_is_cut,
        cut.EvenCut.end,
        "start + left - left % self.batch_size"
        " → self.num_samples - self.num_samples % self.batch_size",
    ),
    Mutant(
        "L53: the newest checkpoint is restored where step 0 is asked for",
        test_store_calls.test_a_store_is_what_was_saved_and_kept,
        checkpoint_store.CheckpointStore.restore,
        "steps[-1] if step is None else step → step or steps[-1]",
    ),
    Mutant(
        "L53: a run that went back loses what it has just saved",
        test_store_calls.test_a_store_is_what_was_saved_and_kept,
        retention.Retention.after,
        "{step, *self._kept()} → self._kept()",
    ),
    Mutant(
        "L41: a head that a checkpoint lacks is passed over though nobody allowed it",
        test_load_calls.test_a_partial_load_is_what_was_asked_for,
        partial.Wanted.refuses,
        'found.missing and self.missing == "error"'
        ' → found.missing and self.extra == "error"',
    ),
    Mutant(
        "L55: what is said at a launch changes nothing where a file says something else",
        test_launch_calls.test_a_launch_is_what_its_settings_say,
        settings.Settings.of.__func__,
        "if text is not None: → if text is not None and name not in written:",
    ),
    Mutant(
        "L55: two elastic runs that meet at one address become one",
        test_launch_calls.test_machines_meet_as_they_were_told,
        settings.Settings.machines,
        'run_id=self["rdzv_id"] → run_id="accelfn"',
    ),
    Mutant(
        "L55: ranks of a smaller machine take GPUs that it has not",
        test_launched_places.test_a_rank_is_where_its_launcher_says,
        slurm.place_of,
        "local_size=per_node[node_rank] → local_size=per_node[0]",
    ),
    Mutant(
        "L55: on a busy machine the report of a run begins with a consequence",
        test_causes.test_the_cause_of_a_failure_comes_first,
        failures.by_cause,
        "ended_by_us=each.ended_by_us and not (each.error and each.at < first)"
        " → ended_by_us=each.ended_by_us",
    ),
    Mutant(
        "L55: the report of a run begins with a consequence",
        test_causes.test_the_cause_of_a_failure_comes_first,
        failures.by_cause,
        "return ended_by_us, failure.lost_peer, is_blamed, failure.at"
        " → return ended_by_us, is_blamed, failure.lost_peer, failure.at",
    ),
    Mutant(
        "L2: ranks that differ in a tensor of a tuple pass for replicas",
        test_replicas.test_any_leaf_of_a_slot_is_compared,
        alike._rows,
        "(list, tuple) → list",
    ),
    Mutant(
        "L50: a run that is resumed in a state of another seed is another run",
        test_shared_draws.test_what_is_loaded_draws_by_its_own_seed,
        shared_draws.draws_for,
        "known is None or known[0] != state.seed → known is None",
    ),
    Mutant(
        "L50: augmentation draws from the process's generators, and moves them",
        test_ranks_data.test_draws_beside_data_that_draw_nothing,
        mixed.Joined.is_pure,
        "all(part.is_pure → any(part.is_pure",
    ),
    Mutant(
        "L2: ranks that trained apart evaluate another model each",
        test_parameters.test_what_is_frozen_and_thawed_is_averaged_and_evaluated,
        local_sgd.local_sgd.eval_params,
        "skeleton.once_trained → skeleton.trainable",
    ),
    Mutant(
        "L28: the average stays behind a parameter that does not move any more",
        test_parameters.test_what_is_frozen_and_thawed_is_averaged_and_evaluated,
        ema.ema.after_update,
        "if _averages(param)"
        " → if _averages(param) and name in state.definition.skeleton.trainable",
    ),
    Mutant(
        "L54: a skipped update at an epoch's end costs the epoch's numbers",
        test_running.test_it_is_the_loop,
        run._Actions.take,
        "due = batch.ends_epoch → due = updated and batch.ends_epoch",
    ),
    Mutant(
        "L2: ranks whose sums a transform takes go by rates of their own",
        test_plateau.test_ranks_observe_the_same,
        observe.observe,
        'setup.owners["engine"] or setup.owners["reduce"] → setup.owners["engine"]',
    ),
    Mutant(
        "L2: ranks that agree send one another all that they say",
        test_definitions.test_ranks_that_agree_say_as_much_on_any_number_of_ranks,
        replicas._tables_apart,
        "if are_told_alike(said, world, label=label): → if not said:",
    ),
    Mutant(
        "L2: ranks with other rates train together",
        test_definitions.test_any_two_that_differ_are_told_apart,
        agreement._plain,
        "value.tolist() if value.numel() == 1 else tuple(value.shape)"
        " → tuple(value.shape)",
        args={"part": "optimizer"},
    ),
]
