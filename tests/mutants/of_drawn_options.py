# SPDX-License-Identifier: Apache-2.0
"""Bugs in options that were drawn from too few values: sizes that were never crossed."""

from accelfn.definition import slots
from accelfn.engine import ddp, shard_home
from accelfn.engine import fsdp as fsdp_runner
from accelfn.engine.module import parallel_layers
from accelfn.outer import fragments
from accelfn.step import sync_grads
from accelfn.structure import prototype
from accelfn.testing.comparing import differences
from accelfn.transforms import diloco, fsdp, local_sgd
from accelfn.weights import shards
from tests.kit import test_states
from tests.laws import (
    test_ddp,
    test_diloco,
    test_dividing,
    test_export,
    test_fully_sharded,
    test_layer_draws,
    test_local_sgd,
    test_optimizers,
    test_other_options,
)
from tests.mutants.mutant import Mutant
from tests.unit import test_state

FILES = test_export.test_files_hold_what_they_may

BUFFERS = test_ddp.test_buffers_cross_once_an_update

MUTANTS = [
    Mutant(
        "L6: all replicas begin each micro-batch with rank 0's buffers",
        BUFFERS,
        ddp.DDPRunner.forward,
        "ddp.require_forward_param_sync = samples.begins"
        " → ddp.require_forward_param_sync = True",
    ),
    Mutant(
        "L6: all parts begin each micro-batch with rank 0's buffers",
        BUFFERS,
        fsdp_runner.FSDPRunner.forward,
        "if samples.begins: → if True:",
    ),
    Mutant(
        "L50: behind what is scattered all ranks draw the same for their positions",
        test_layer_draws.test_scattered_positions_have_draws_of_their_own,
        parallel_layers.scatter,
        "training=module.training → training=False",
    ),
    Mutant(
        "L3: gradients of a mean are added up over ranks as if they were totals",
        test_dividing.test_sync_grads_gives_what_ddp_gives,
        sync_grads.sync_grads,
        "factor = taken.scale if taken.lease.is_mean else 1 → factor = 1",
    ),
    Mutant(
        "L26: where parts are accumulated, unused parameters are refused though allowed",
        test_dividing.test_parts_that_are_unused_are_as_on_one_rank,
        fsdp.wrap_fsdp.engine,
        "finds_unused=self.find_unused_parameters,"
        ' → finds_unused=self.accumulate == "whole" and self.find_unused_parameters,',
    ),
    Mutant(
        "L10: buffers of local_sgd are as large as all that is averaged",
        test_local_sgd.test_it_communicates_when_it_says,
        local_sgd.local_sgd._average_,
        "bucket_cap_mb=cap → bucket_cap_mb=None",
    ),
    Mutant(
        "L10: buffers of diloco are as large as all that is exchanged",
        test_diloco.test_its_bytes_are_these,
        diloco.diloco._averaged,
        "bucket_cap_mb=self.bucket_cap_mb → bucket_cap_mb=None",
    ),
    Mutant(
        "L10: a bucket of diloco is full when its last parameter alone would be",
        test_diloco.test_in_few_bits_a_bucket_has_what_fits,
        fragments.together,
        "size, axes = size + more, cut → size, axes = more, cut",
    ),
    Mutant(
        "L10: neighbours average their parameters alone, whatever was asked for",
        test_local_sgd.test_a_part_that_is_all_ranks_meets_as_all_do,
        local_sgd.local_sgd._near,
        "self._averaged(state, ranks) → list(state.params.values())",
    ),
    Mutant(
        "L11: the outer optimizer forgets its momentum when bits or fragments are others",
        test_other_options.test_other_options_go_on_from_the_anchor,
        diloco.diloco._fitted,
        'slot["outer"] → {}',
    ),
    Mutant(
        "L3: what a model is given by name is not in the dtype in which it computes",
        test_fully_sharded.test_a_step_is_that_of_the_tutorial,
        shard_home._cast,
        "tree.tree_map(cast, kwargs) → kwargs",
    ),
    Mutant(
        "L11: neighbours within a part that met keep what they weighed before it",
        test_local_sgd.test_neighbours_meet_more_often,
        local_sgd.local_sgd._near,
        "if period <= last → if period == last",
    ),
    Mutant(
        "a copied state's objects have their lists in common with the first one's",
        test_state.test_a_copy_keeps_what_is_one_tensor,
        slots.own_objects,
        "copy.deepcopy(leaf) → copy.copy(leaf)",
    ),
    Mutant(
        "L26: a partition takes the state of one whose parts have as many parameters",
        test_optimizers.test_parts_take_no_other_parts_state,
        prototype._share,
        "sorted(owned) → sorted(names.values())",
    ),
    Mutant(
        "whatever differs is near where an element is infinite",
        test_states.test_a_tolerance_is_of_the_largest_element,
        differences.largest,
        "each[each.isfinite()].abs() → each.abs()",
    ),
    Mutant(
        "L41: a file of an export is never filled to the last byte",
        FILES,
        shards.divided,
        "held + size > limit → held + size >= limit",
    ),
    Mutant(
        "L41: a file of an export begins with what it has of the one before",
        FILES,
        shards.divided,
        "open_, held = [], 0\n        open_.append → open_ = []\n        open_.append",
    ),
]
