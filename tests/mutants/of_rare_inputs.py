# SPDX-License-Identifier: Apache-2.0
"""Bugs that show in what hardly anybody gives."""

from accelfn.base import shards as base_shards
from accelfn.checkpoint import keep, lock, slices, store
from accelfn.collectives import packed
from accelfn.data.budget import budget
from accelfn.launching import crew, watch
from accelfn.loop import memory_use
from accelfn.outer import fragments
from accelfn.placing import placed, units
from accelfn.testing.simulation import faults
from accelfn.track import log, values
from accelfn.weights import shards, zero_parts
from accelfn.world import roll_call, slurm, torchrun
from tests.accelerator import test_placed
from tests.laws import test_slices
from tests.mutants.mutant import Mutant
from tests.simulation import test_faults
from tests.unit import (
    test_crew,
    test_diloco,
    test_import_deepspeed,
    test_memory,
    test_place,
    test_placing,
    test_track,
    test_track_values,
)
from tests.unit import test_rare_inputs as tests

MUTANTS = [
    Mutant(
        "a batch that begins with samples that cost nothing never ends",
        tests.test_a_batch_has_a_sample_though_it_costs_nothing,
        budget._fitting,
        "np.maximum(np.maximum.accumulate(costs), 1) → np.maximum.accumulate(costs)",
    ),
    Mutant(
        "a tensor laid as a parameter in another dtype changes what the parameter says of its own",
        tests.test_a_tensor_laid_as_another_leaves_that_one_s_dtype_alone,
        base_shards.with_local,
        "spec = copy.copy(spec) → pass",
    ),
    Mutant(
        "a manifest that cannot be read hides the checkpoints behind it from the best",
        tests.test_a_manifest_that_cannot_be_read_hides_no_other,
        keep.best_of,
        "continue → break",
        args={"broken": 1},
    ),
    Mutant(
        "a newer checkpoint is called an older one",
        tests.test_a_manifest_that_cannot_be_read_hides_no_other,
        store.CheckpointStore.restore,
        "each < chosen] → each != chosen]",
        args={"broken": 1},
    ),
    Mutant(
        "a process that is dead, and that nobody waited for, holds its lock",
        tests.test_a_process_that_is_dead_holds_no_lock,
        lock._begun,
        'None if state == "Z" else rest[18] → rest[18]',
    ),
    Mutant(
        "a model without tensors is exported to no file",
        tests.test_files_have_each_tensor_once,
        shards.divided,
        "if open_ or not shards: → if open_:",
    ),
    Mutant(
        "the next job's first step meets where this one's second does",
        tests.test_steps_of_jobs_that_follow_one_another_have_other_ports,
        slurm._port_of_job,
        "1009 * step → step",
    ),
    Mutant(
        "means come in the order of the alphabet",
        tests.test_metrics_come_in_the_order_that_they_have,
        packed.sum_named,
        "{name: sums[name] for name in numbers} → sums",
    ),
    Mutant(
        "of more than five metrics those beyond are this rank's own",
        tests.test_metrics_come_in_the_order_that_they_have,
        packed.sum_named,
        "summed += _summed(rest, world, label) → summed += map(_read, rest)",
    ),
    Mutant(
        "of a rank that followed the last line of its error is told, without its kind",
        tests.test_an_error_of_several_lines_is_told_by_its_first,
        roll_call.name_error,
        'first, _, rest = text.partition("\\n") → rest, _, first = text.rpartition("\\n")',
    ),
    Mutant(
        "a rank with brackets in its name that was stopped is taken for one that goes on",
        tests.test_a_stopped_process_is_known_whatever_its_name,
        watch._is_stopped,
        'rpartition(")") → partition(")")',
    ),
    Mutant(
        "a planned corruption of a NaN changes nothing",
        test_faults.test_corrupt_changes_values_of_any_kind,
        faults._corrupt,
        " or place.isnan(): → :",
        args={"value": test_faults.NAN},
    ),
    Mutant(
        "who takes a killed rank's place is said to have had its error",
        test_crew.test_torch_is_not_asked_of_ranks_that_others_do_without,
        crew.Crew._start,
        "Path(context.error_files[place]).unlink(missing_ok=True) → pass",
    ),
    Mutant(
        "of parts on the host the total has the first alone",
        test_memory.test_what_lies_on_the_host_is_added_up,
        memory_use.Bytes.__add__,
        "host=self.host + other.host → host=self.host",
    ),
    Mutant(
        "a part takes what is in it, and not its room",
        test_memory.test_a_part_takes_the_room_that_it_has,
        memory_use._held,
        "local(tensor).untyped_storage().nbytes() → _size(local(tensor))",
    ),
    Mutant(
        "numbers that all ranks of a copy hold are rounded beside those that are cut",
        test_diloco.test_what_is_rounded_together_is_cut_alike,
        fragments.together,
        " or cut != axes → ",
        args={"most": 100.0},
    ),
    Mutant(
        "a run is not resumed from where it goes back to",
        test_track.test_a_run_is_resumed_where_its_next_step_says,
        log._Story._back_to,
        "if each <= step → if each < step",
        args={"openings": [[1, 2], [3, 4], [3]], "resumed": (2, 2)},
    ),
    Mutant(
        "what was never stepped has been stepped as often as its group",
        test_import_deepspeed.test_a_group_counts_for_those_that_were_stepped,
        zero_parts._entries_of_groups,
        "{**counted, **entry} if entry else {} → {**counted, **(entry or {})}",
    ),
    Mutant(
        "parameters stay away from home where Ctrl-C ends a forward",
        test_placed.test_ctrl_c_in_a_forward_leaves_all_at_home,
        placed._invite,
        'stack.callback(setattr, guest.param, "data", guest.home) → None',
    ),
    Mutant(
        "settings that are three deep lose the first of their names",
        test_track_values.test_settings_within_settings_have_the_whole_way_for_a_name,
        values.flat,
        'f"{prefix}{name}." → f"{name}."',
    ),
    Mutant(
        "what is corrupted behind the first tensor of a call is another element",
        test_faults.test_corrupt_counts_through_all_that_a_call_fills,
        faults._corrupt,
        "number -= each.numel() → pass",
        args={"element": 4},
    ),
    Mutant(
        "a unit that two became is not found by whose parameter it had before",
        test_placing.test_units_that_a_tie_joins_are_one_for_whom_comes_later,
        units.units_of,
        "for each in unit:\n            owners → for each in [part]:\n            owners",
    ),
    Mutant(
        "L47: what parts have besides what is asked for stands in for what they lack",
        test_slices.test_what_no_part_has_is_told,
        slices.assembled,
        "open_ -= here.count\n    if open_: → open_ -= values.numel()\n    if open_ > 0:",
    ),
    Mutant(
        "torchrun has a store wherever it says something of one",
        test_place.test_torchrun_says_whether_it_has_a_store,
        torchrun.place_of,
        'env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"'
        ' → "TORCHELASTIC_USE_AGENT_STORE" in env',
        args={"said": {"TORCHELASTIC_USE_AGENT_STORE": "False"}, "has_store": False},
    ),
]
