# SPDX-License-Identifier: Apache-2.0
"""Bugs that a reader of the code alone planted, and that no test found."""

from accelfn.checkpoint import fields, hashing
from accelfn.collectives import replicas
from accelfn.data import epoch, reading, sources
from accelfn.engine import untaken
from accelfn.engine.module import parallel_layers
from accelfn.engine.optimizer import live_optimizer, trial
from accelfn.launching import agent
from accelfn.loop import control, run, stopping
from accelfn.placing import placed
from accelfn.schedules import of_torch
from accelfn.step import sync_grads
from accelfn.structure import on_meta, partition
from accelfn.testing.processes import rank
from accelfn.testing.simulation import ambient, calls, ranks
from accelfn.track import values
from accelfn.transforms import tensor_parallel
from tests.mutants.mutant import Mutant
from tests.unit import test_unguarded as unit

MUTANTS = [
    Mutant(
        "an optimizer is tried for one update",
        unit.test_an_optimizer_that_couples_later_is_found,
        trial._tried,
        "in range(2): → in range(1):",
    ),
    Mutant(
        "parameters stay in a file that is gone",
        unit.test_a_disk_that_was_lent_is_given_back,
        placed._read_back,
        "held.clone().to(device) → held.to(device)",
    ),
    Mutant(
        "a caller who is warned of what is not deterministic is stopped from then on",
        unit.test_a_program_that_sets_determinism_leaves_the_callers,
        ambient.process_kept,
        "deterministic[0], warn_only=deterministic[1] → deterministic[0]",
        args={"warn_only": True},
    ),
    Mutant(
        "ranks of a later group are said to send what they keep",
        unit.test_what_ranks_of_any_group_keep_is_not_sent,
        calls.Call.num_bytes_for_others,
        "self.group.place_of(self.rank) → self.rank",
        args={"axes": {"dp_shard": 2, "cp": 2}},
    ),
    Mutant(
        "an epoch that was sought ends where another one would",
        unit.test_an_epoch_that_was_sought_ends_where_its_batches_do,
        epoch.portions,
        "epoch.cut.end(start.samples) → epoch.cut.end(0)",
    ),
    Mutant(
        "a run that is beyond its end goes on for ever",
        unit.test_a_run_goes_until_an_update_and_no_further,
        run._end,
        "state.step >= until, None → state.step == until, None",
    ),
    Mutant(
        "what a scheduler changed late was so before",
        unit.test_a_schedule_goes_back_to_what_was_before,
        of_torch.TorchRates._note,
        "[given] * self._num_known → [now] * self._num_known",
    ),
    Mutant(
        "hooks behind the steps of all optimizers are not called",
        unit.test_hooks_of_all_optimizers_see_updates,
        live_optimizer.LiveOptimizer.update,
        "_global_optimizer_pre_hooks or _global_optimizer_post_hooks → _global_optimizer_pre_hooks",
    ),
    Mutant(
        "a rank's own gradients are multiplied as they are added up",
        unit.test_gradients_of_a_rank_stay_when_they_are_added_up,
        sync_grads.sync_grads,
        "local(grads.as_taken[name]) * factor → local(grads.as_taken[name]).mul_(factor)",
    ),
    Mutant(
        "rows that two ranks have exchanged have the checksum of a copy",
        unit.test_parts_that_two_ranks_have_exchanged_are_told,
        replicas.sums_of,
        "torch.stack([checksum(each) for each in parts.unbind(1)]) → parts.sum(0)",
    ),
    Mutant(
        "what a loss froze beyond five parameters stays frozen",
        unit.test_what_a_loss_froze_is_trained_once_it_is_told,
        untaken.refuse_frozen,
        "for name in frozen: → for name in frozen[:5]:",
        args={"count": 9},
    ),
    Mutant(
        "of several large tensors another one is said to have changed",
        unit.test_of_large_tensors_the_one_that_changed_is_named,
        hashing.Hashing._compare,
        "self._under_way.popleft().result() → self._under_way.pop().result()",
        args={"broken": "a"},
    ),
    Mutant(
        "a row layer with a bias leaves the dtype of autocast",
        unit.test_a_row_layer_with_a_bias_keeps_the_dtype_of_autocast,
        parallel_layers.RowLinear.forward,
        "bias.to(total.dtype) → bias",
    ),
    Mutant(
        "a loss that is NaN is said to be of other batches",
        unit.test_a_first_loss_that_is_nan_is_told_as_such,
        tensor_parallel._check,
        "told[:, 0].nan_to_num(), told[:1, 0].nan_to_num() → told[:, 0], told[:1, 0]",
    ),
    Mutant(
        "torch's launcher fills in names without braces",
        unit.test_arguments_of_a_script_are_not_filled_in,
        agent._as_template,
        'replace("$", "$$") → replace("${", "$${")',
    ),
    Mutant(
        "a rank's own stream goes on where another loop left it",
        unit.test_a_loop_that_was_left_is_not_what_the_next_begins_with,
        reading._stream_pairs,
        "first=data.first, → ",
        args={"sharded": True},
    ),
    Mutant(
        "a run has the updates of its first rank",
        unit.test_a_run_has_as_many_updates_as_the_rank_with_most,
        ranks._run,
        "max(group.activity.num_updates for group in groups) → groups[0].activity.num_updates",
    ),
    Mutant(
        "ranks that are all sent a signal add it up",
        unit.test_ranks_that_are_all_sent_a_signal_agree_on_it,
        stopping.Stop.requested,
        '"max", label="stopping" → "sum", label="stopping"',
        args={"numbers": (15, 15)},
    ),
    Mutant(
        "what is loaded is in the order of the file",
        unit.test_what_is_loaded_is_in_the_models_order,
        fields.with_fields,
        '{name: saved["params"][name] for name in state.params} → dict(saved["params"])',
        args={"frozen": "hash"},
    ),
    Mutant(
        "what a factory noted on parameters is lost where they are drawn in parts",
        unit.test_what_a_factory_notes_on_parameters_is_there_for_the_optimizer,
        on_meta.parameters_on_meta,
        "vars(empty).update(vars(param)) → pass",
        args={"init": "shard"},
    ),
    Mutant(
        "a collate of a table draws from anywhere",
        unit.test_a_collate_of_a_table_draws_by_its_place,
        sources.Table.samples,
        "begin(0) → pass",
    ),
    Mutant(
        "ranks at one place of two epochs agree",
        unit.test_ranks_that_stand_at_other_places_do_not_agree,
        control.assert_replicas_agree.__wrapped__,
        '"epoch": state.cursor.epoch, → ',
        args={"apart": (0, 1)},
    ),
    Mutant(
        "a hook that wrote is taken for torch's code",
        unit.test_a_hook_that_wrote_before_it_raised_has_changed_the_state,
        partition.is_torchs,
        "and not any(hooks) → and hooks is not None",
        args={"error": ArithmeticError},
    ),
    Mutant(
        "what a hook does not find is what an optimizer lacks",
        unit.test_a_hook_that_wrote_before_it_raised_has_changed_the_state,
        live_optimizer.LiveOptimizer._stepped,
        "if not _is_of(optimizer, error): → if False:",
        args={"error": KeyError},
    ),
    Mutant(
        "axes of the same names have the same groups",
        unit.test_axes_of_other_sizes_have_other_groups,
        rank._groups,
        "tuple(axes.items()) → tuple(axes)",
    ),
    Mutant(
        "an image that is NaN has a colour",
        unit.test_an_image_with_a_number_of_no_colour_is_refused,
        values.pixels,
        "if not (low >= 0 and high <= 1): → if low < 0 or high > 1:",
        args={"bad": float("nan")},
    ),
]
