# SPDX-License-Identifier: Apache-2.0
"""Bugs in models that are split over the ranks."""

import torch

from accelfn.base import shards
from accelfn.checkpoint import elastic
from accelfn.definition import cuts, layout
from accelfn.engine import fsdp, parts, shard_home, unit_order
from accelfn.engine.module import synced_norm, units
from accelfn.engine.optimizer import trial
from accelfn.loop import evaluate, memory, memory_use
from accelfn.state import update, values, views
from accelfn.testing.comparing import differences
from accelfn.transforms import clip
from tests.laws import (
    test_branches,
    test_layouts,
    test_memory,
    test_random_steps,
    test_really_sharded,
    test_shard_histories,
    test_shards,
)
from tests.mutants.mutant import Mutant
from tests.unit import test_trial, test_wrap_fsdp

TRAINS = test_shards.test_parts_train_what_the_whole_does
SKIPS = test_shards.test_an_update_is_skipped_on_all_ranks_or_none
APART = test_shard_histories.test_states_do_not_meet
LOADS = test_layouts.test_what_is_saved_in_one_layout_is_loaded_in_another
MOVES = test_layouts.test_another_setup_and_back_changes_nothing
SHARE = test_really_sharded.test_each_rank_has_its_share_and_no_more
CROSS = test_really_sharded.test_what_crosses_the_ranks_is_units
STEPS = test_random_steps.test_any_step_is_the_loop_by_hand
BYTES = test_memory.test_an_estimate_of_parts_is_exact

MUTANTS = [
    Mutant(
        "L1: gradients of lone numbers are summed over the ranks, the others averaged",
        TRAINS,
        fsdp.FSDPRunner._reduced,
        "gradient.div_(ranks.size) → pass",
    ),
    Mutant(
        "L1: gradients of lone numbers do not cross the ranks",
        TRAINS,
        fsdp.FSDPRunner._reduced,
        "[sums, *whole] → [sums]",
    ),
    Mutant(
        "L3: the weight that parts of gradients are divided by is that of all ranks, not"
        " their mean",
        TRAINS,
        fsdp.FSDPRunner.backward,
        "total / self._ranks.size → total",
    ),
    Mutant(
        "L3: each rank divides its parts by the weight of its own losses",
        TRAINS,
        fsdp.FSDPRunner._reduced,
        "return sums[0] → return torch.as_tensor(weight) * ranks.size",
    ),
    Mutant(
        "L4: the first micro-batch of an update reduces as the last one does",
        CROSS,
        fsdp.FSDPRunner.forward,
        "reduces = sync or self._in_parts → reduces = True",
    ),
    Mutant(
        "L4: micro-batches of which parts are kept are not reduced before the last",
        CROSS,
        fsdp.FSDPRunner.forward,
        "reduces = sync or self._in_parts → reduces = sync",
    ),
    Mutant(
        "ranks go on from their own buffers",
        test_wrap_fsdp.test_buffers_are_those_of_replicas,
        fsdp.FSDPRunner.forward,
        "if samples.begins: → if False:",
    ),
    Mutant(
        "a gradient that no rank's loss came by counts as zeros, and is stepped",
        test_wrap_fsdp.test_a_part_of_a_unit_is_left_out_by_one_rank,
        fsdp.FSDPRunner._reduced,
        "if n not in self._parts → if False",
        args={"ranks": set()},
    ),
    Mutant(
        "what one rank's loss did not come by has no gradient there",
        test_wrap_fsdp.test_a_part_of_a_unit_is_left_out_by_one_rank,
        fsdp.FSDPRunner._reduced,
        "float(used[name]) → 0.0",
        args={"ranks": {0}},
    ),
    Mutant(
        "parts that earlier micro-batches left are dropped by one that does without",
        test_wrap_fsdp.test_a_part_of_an_earlier_micro_batch_stays,
        fsdp.FSDPRunner._reduced,
        "n for n in unused if n not in self._parts → n for n in unused",
    ),
    Mutant(
        "L33: torch gathers the parts of the state that was bound first",
        APART,
        shard_home.ShardHome.bind,
        "split._sharded_param_data = part.as_strided( → _ = part.as_strided(",
    ),
    Mutant(
        "L33: the optimizer steps the parts of the state that was bound first",
        APART,
        shard_home.ShardHome.bind,
        "held._local_tensor = param.data = part → held._local_tensor = part",
    ),
    Mutant(
        "L33: parts without room are padded, and the state keeps the ones from before",
        LOADS,
        shard_home.ShardHome.bind,
        "part = value._local_tensor = self._rehomed → part = self._rehomed",
    ),
    Mutant(
        "L33: gradients that were looked at stay, and are added to those of the next step",
        APART,
        shard_home.ShardHome.clear_gradients,
        "split._unsharded_param.grad = None → pass",
    ),
    Mutant(
        "L3: gradients that were reduced are put where a backward pass adds",
        STEPS,
        shard_home.ShardHome.put_gradients,
        "elif grads.reduced: → elif False:",
    ),
    Mutant(
        "L3: accumulated gradients in another dtype than is computed in are dropped",
        CROSS,
        shard_home._put_whole,
        "split.unsharded_accumulated_grad = grad → raise AssertionError",
    ),
    Mutant(
        "L8: gradients are reduced in the dtype in which parameters are gathered",
        CROSS,
        shard_home.Splitter._policy,
        "self.reduce_dtype or (own if self.gather_dtype else None) → self.reduce_dtype",
    ),
    Mutant(
        "units are kept after their forward pass, whatever was asked for",
        test_wrap_fsdp.test_units_are_given_up_as_was_asked,
        shard_home.Splitter.split,
        "None if self.reshard_after_forward else False → False",
        args={"reshard": True},
    ),
    Mutant(
        "L4: a model has no units, all of it is gathered at once",
        CROSS,
        shard_home.Splitter.split,
        "reversed(self.units(module)) → ()",
    ),
    Mutant(
        "L24: moments of the optimizer are shown as whole tensors",
        SHARE,
        parts.Parts._entry,
        "part_like(value, part) if _fits(part, param) else part → part",
    ),
    Mutant(
        "L24: the optimizer goes on without what it had when another state was stepped",
        APART,
        parts.Parts.raw,
        "for name, entry in opt_state.items() → for name, entry in ()",
    ),
    Mutant(
        "L47: a rank whose part is the last has one row more than the others leave it",
        TRAINS,
        layout.Layout.cut,
        "part.narrow(dim, min(begin - there[dim], part.shape[dim]), length)"
        " → part.narrow(dim, 0, length)",
    ),
    Mutant(
        "L47: another layout takes the values that stand in the state that it is given",
        SHARE,
        layout.laid_out,
        "tensor.shape != shapes[name] → True",
    ),
    Mutant(
        "L45: what has a parameter's name is cut as it is, whatever its shape",
        SHARE,
        elastic._belonging,
        "manifest.shape_of(tensor) == tuple(layout.shapes[param]) → True",
    ),
    Mutant(
        "L45: what is loaded of an optimizer is whole on every rank",
        SHARE,
        elastic._belonging,
        "if layout is None: → if True:",
    ),
    Mutant(
        "L34: a part has memory for the whole",
        BYTES,
        cuts.largest_part,
        "-(-lengths[dim] // axes[axis]) → lengths[dim]",
    ),
    Mutant(
        "axes of one rank are cut along",
        test_wrap_fsdp.test_a_world_of_one_is_whole,
        cuts.cuts_of,
        "if axes.get(axis, 1) > 1 → if True",
    ),
    Mutant(
        "L33: a copy of a part has no memory of its own",
        APART,
        shards.copied,
        "padded(part.detach(), room(part)) → part.detach()",
    ),
    Mutant(
        "L33: what is made of a part has the memory of the first rank's rows",
        TRAINS,
        shards.padded,
        ".copy_(part) → .zero_()",
    ),
    Mutant(
        "L47: a state that is created for other ranks' parts is whole there",
        SHARE,
        values.carried,
        "on_device(laid_out(values, before, after), after) → values",
    ),
    Mutant(
        "parameters that are put in are whole on each rank",
        test_wrap_fsdp.test_parameters_that_are_put_in_are_cut,
        values.cut,
        "p if is_shard(p) else layout.cut(n, p) → p",
    ),
    Mutant(
        "evaluation gathers what is trained, and not the averages",
        test_wrap_fsdp.test_averages_are_evaluated,
        evaluate._Lent._lent,
        "lend(params, buffers) → lend(self._state.params, buffers)",
    ),
    Mutant(
        "a module that is lent has parts",
        test_wrap_fsdp.test_what_is_lent_is_whole,
        views.bind,
        'params = wholes(params, state.world, label="af.bind") → pass',
    ),
    Mutant(
        "L47: a state that comes back from another layout has parts of the first rank",
        MOVES,
        layout.Layout.cut,
        "part.narrow(dim, min(begin - there[dim], part.shape[dim]), length)"
        " → part.narrow(dim, 0, length)",
    ),
    Mutant(
        "L47: the kit takes all parts of two states for equal",
        test_layouts.test_the_kit_compares_what_is_split,
        differences._plain,
        "local(tensor.detach()).cpu() → torch.zeros_like(local(tensor.detach()))",
    ),
    Mutant(
        "L14: the norm is of a rank's own parts",
        TRAINS,
        clip._norm_of_shards,
        "if not placement.is_replicate(): → if False:",
    ),
    Mutant(
        "L14: copies of a model count in the norm, each once more",
        TRAINS,
        clip._norm_of_shards,
        "if not placement.is_replicate(): → if True:",
    ),
    Mutant(
        "L14: norms of ranks are added up, and not their powers",
        TRAINS,
        clip._norm_of_shards,
        "norm**norm_type if finite → norm if finite",
    ),
    Mutant(
        "L18: each rank judges by its own parts whether an update is skipped",
        SKIPS,
        update.Update.replicated,
        "(apart or have_shards(grads.as_taken.values())) → apart",
    ),
    Mutant(
        "an optimizer that does otherwise in parts is not refused",
        test_wrap_fsdp.test_an_optimizer_that_couples_elements_is_refused,
        trial._close,
        "return bool( → return True or bool(",
        args={"name": "Adafactor"},
    ),
    Mutant(
        "an optimizer's groups are tried as if each did what the first does",
        test_trial.test_whatever_group_couples_elements_is_found,
        trial._two_of_a_kind,
        "kind = groups[id(meta)], → kind = 0,",
    ),
    Mutant(
        "layers that are frozen are tried in place of those that are trained",
        test_trial.test_whatever_group_couples_elements_is_found,
        trial._two_of_a_kind,
        "name in trainable → None",
    ),
    Mutant(
        "an optimizer is tried on each layer of a deep model",
        test_trial.test_layers_that_are_alike_are_not_all_tried,
        trial._two_of_a_kind,
        "if seen[kind] <= _OF_A_KIND → if True",
    ),
    Mutant(
        "what is captured on accelerators is tried so on the host",
        test_wrap_fsdp.test_an_optimizer_that_is_for_accelerators_alone_is_tried,
        trial._tried,
        "if name in group → if name in group and value",
        args={"kind": torch.optim.AdamW},
    ),
    Mutant(
        "members of lists in blocks are units, too",
        test_wrap_fsdp.test_units_are_of_the_outermost_list,
        units._outermost_lists,
        "return [module] → return [each for each in module.modules()"
        " if isinstance(each, nn.ModuleList)]",
    ),
    Mutant(
        "a parameter that is tied over two units is gathered by both",
        test_wrap_fsdp.test_what_cannot_be_split_is_refused,
        units.check_units,
        "owner.setdefault(id(param), unit) != unit → False",
        args={"case": "tied"},
    ),
    Mutant(
        "L34: the bytes of a rank are those of the whole",
        BYTES,
        memory_use._held,
        "if is_shard(tensor): → if False:",
    ),
    Mutant(
        "L34: an estimate counts what has not a parameter's shape as cut",
        BYTES,
        memory._Size.of,
        "name is not None and tensor.shape == self.shapes[name] → name is not None",
    ),
    Mutant(
        "whole gradients of micro-batches are estimated as parts",
        test_wrap_fsdp.test_whole_gradients_are_estimated,
        memory._counted,
        "whole if _are_whole(setup) else size.of(gradients) → size.of(gradients)",
        args={"accumulate": "whole", "parts": 1},
    ),
    Mutant(
        "L1: a rank that does not run a unit gives the others zeros for its rows",
        test_branches.test_ranks_run_other_layers,
        unit_order.UnitOrder._gather_rows,
        "part = torch.cat(rows) → part = torch.cat(rows).zero_()",
    ),
    Mutant(
        "L3: layers in branches are normalised by the samples of rank 0",
        test_branches.test_ranks_normalize_in_other_layers,
        synced_norm.SyncedNorm.__call__,
        "counts, self.label) → counts and not self.ranks.rank, self.label)",
    ),
]
