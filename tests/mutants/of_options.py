# SPDX-License-Identifier: Apache-2.0
"""Bugs in options and calls that laws had not drawn beside one another."""

from accelfn.checkpoint import command
from accelfn.checkpoint.load import load_part
from accelfn.checkpoint.store import CheckpointStore
from accelfn.collectives import trees
from accelfn.data import sharded
from accelfn.data.dataset import Data
from accelfn.launching.settings import Settings
from accelfn.loop.memory import _counted, memory_estimate
from accelfn.track.comet import _Comet
from accelfn.track.mlflow import _MLflow
from accelfn.track.wandb import wandb
from accelfn.weights.import_state import _read
from tests.laws import (
    test_averages,
    test_buckets,
    test_import_state,
    test_launch_calls,
    test_memory,
    test_storage,
    test_store_calls,
    test_streams,
    test_unequal_streams,
)
from tests.mutants.mutant import Mutant
from tests.unit import test_cli_checkpoint, test_track_packages
from tests.unit import test_memory as unit_memory

OF_CHECKPOINTS = [
    Mutant(
        "L41: what of a checkpoint is asked for is loaded from a file that has changed",
        test_storage.test_whoever_reads_notices_a_change,
        load_part,
        "read_manifest(folder), folder, verify=verify)"
        " → read_manifest(folder), folder, verify=False)",
    ),
    Mutant(
        "L45: a store does not hear what may differ in the data",
        test_store_calls.test_data_may_differ_in_what_is_allowed,
        CheckpointStore._load,
        "load(state, folder, allow=allow) → load(state, folder)",
    ),
    Mutant(
        "L45: a place in the data is loaded into other ones, if any difference is allowed",
        test_store_calls.test_data_may_differ_in_what_is_allowed,
        load_part,
        'if "cursor" in wanted.only: → if "cursor" in wanted.only and not allow:',
    ),
    Mutant(
        "L53: a store writes frozen parameters that are to be kept by their hash",
        test_store_calls.test_a_store_is_what_was_saved_and_kept,
        CheckpointStore._begun,
        "contents_of(state, self.frozen, metrics=metrics)"
        ' → contents_of(state, "write", metrics=metrics)',
    ),
    Mutant(
        "L41: what an optimizer keeps of a tied parameter is lost under its other name",
        test_import_state.test_what_torch_saved_goes_on,
        _read,
        "kept = {aliases.get(name, name): each for name, each in found.entries.items()}"
        " → kept = dict(found.entries)",
    ),
]

OF_DATA = [
    Mutant(
        "L36: what a stream leaves out in training is left out in evaluation, too",
        test_streams.test_a_stream_is_evaluated_on_each_sample_once,
        Data.in_order,
        'data = attrs.evolve(self, remainder="short") → data = attrs.evolve(self)',
    ),
    Mutant(
        "L36: a stream is evaluated from where the last evaluation has left it",
        test_streams.test_a_stream_is_evaluated_on_each_sample_once,
        Data.in_order,
        'object.__setattr__(data, "first", self.first) → pass',
    ),
    Mutant(
        "L36: updates are counted as those of another seed",
        test_buckets.test_budgets_are_kept_and_used,
        Data.num_updates,
        "self.num_updates_of(i, seed=seed) → self.num_updates_of(i, seed=0)",
    ),
    Mutant(
        "L42: samples of ranks' own streams have one number on all ranks",
        test_unequal_streams.test_ranks_with_unequal_streams_see_each_sample_once,
        sharded.Sharded._epoch,
        "first = cursor.samples + before → first = cursor.samples",
    ),
]

OF_REPORTS = [
    Mutant(
        "a frozen parameter's gradient lies in a bucket",
        unit_memory.test_what_is_frozen_is_in_no_bucket,
        _counted,
        "buckets=grads if copied else 0 → buckets=size.of(params) if copied else 0",
    ),
    Mutant(
        'L20: what a model takes is estimated as if ranks along "cp" had all of it',
        test_memory.test_an_estimate_counts_parts_of_sequences,
        memory_estimate,
        'folded(extents("af.memory_estimate", axes))'
        ' → extents("af.memory_estimate", axes)',
    ),
    Mutant(
        "a run of W&B is begun anew where it is to be gone on with",
        test_track_packages.test_a_run_has_its_name_and_is_gone_on_with,
        wandb,
        'None if run_id is None else "allow" → None',
    ),
    Mutant(
        "an experiment of Comet is begun anew where it is to be gone on with",
        test_track_packages.test_a_run_has_its_name_and_is_gone_on_with,
        _Comet.__init__,
        '"create" if run_id is None else "get_or_create" → "create"',
    ),
    Mutant(
        "an experiment of Comet has no name of the user's",
        test_track_packages.test_a_run_has_its_name_and_is_gone_on_with,
        _Comet.__init__,
        "name=name, → ",
    ),
    Mutant(
        "a run of MLflow has no name of the user's",
        test_track_packages.test_a_run_has_its_name_and_is_gone_on_with,
        _MLflow.__init__,
        "client.create_run(key, run_name=name) → client.create_run(key)",
    ),
    Mutant(
        "of many numbers MLflow gets the first hundred",
        test_track_packages.test_mlflow_is_given_no_more_than_it_takes_at_once,
        _MLflow.metrics,
        "range(0, len(told), _AT_ONCE) → range(0, 1, _AT_ONCE)",
    ),
]

OF_CALLS = [
    Mutant(
        "what a slot has not of a model is left out of its export",
        test_cli_checkpoint.test_what_a_slot_has_not_is_exported_as_it_is_trained,
        command._exported,
        "params |= found → params = found",
    ),
    Mutant(
        "L49: a mean by weight crosses in one buffer, however small it is to be",
        test_averages.test_a_mean_crosses_in_buffers_as_large_as_asked,
        trees.reduce,
        "cap = bucket_cap_mb → cap = None",
    ),
    Mutant(
        "L55: machines that have numbers wait as long for one another whatever is said",
        test_launch_calls.test_machines_meet_as_they_were_told,
        Settings.machines,
        "counts=(count, count),\n"
        '        join_seconds=self["join_timeout"],'
        " → counts=(count, count),\n        join_seconds=300,",
    ),
]

OF_DRAWS = [
    Mutant(
        "L50: the workers of a stream of a rank's own augment it alike",
        test_unequal_streams.test_workers_of_unequal_streams_draw_apart,
        sharded.Counted.__iter__,
        "draws.fold(self._key, 0 if info is None else info.id) → self._key",
    ),
]

MUTANTS = [*OF_CHECKPOINTS, *OF_DATA, *OF_REPORTS, *OF_CALLS, *OF_DRAWS]
