# SPDX-License-Identifier: Apache-2.0
"""More bugs in models that are split: in what is moved, saved, lent, gathered and told."""

from accelfn.checkpoint import commit, elastic, partial
from accelfn.collectives import replicas
from accelfn.definition import layout
from accelfn.engine import ddp, fsdp, shard_home
from accelfn.state import values
from accelfn.transforms import clip
from accelfn.weights import export
from tests.laws import (
    test_fully_sharded,
    test_layouts,
    test_really_sharded,
    test_shard_histories,
    test_shards,
)
from tests.mutants.mutant import Mutant
from tests.unit import test_split_models as unit
from tests.unit import test_wrap_fsdp

TUTORIAL = test_fully_sharded.test_a_step_is_that_of_the_tutorial
TRAINS = test_shards.test_parts_train_what_the_whole_does
APART = test_shard_histories.test_states_do_not_meet
LOADS = test_layouts.test_what_is_saved_in_one_layout_is_loaded_in_another
MOVES = test_layouts.test_another_setup_and_back_changes_nothing
SHARE = test_really_sharded.test_each_rank_has_its_share_and_no_more
CROSS = test_really_sharded.test_what_crosses_the_ranks_is_units

MUTANTS = [
    Mutant(
        "L3: units are gathered in the parameters' own dtype, whatever was asked for",
        TUTORIAL,
        shard_home.Splitter.split,
        "mp_policy=self._policy(unit) → mp_policy=MixedPrecisionPolicy()",
    ),
    Mutant(
        "L3: gradients are reduced in the parameters' dtype, whatever was asked for",
        TUTORIAL,
        shard_home.Splitter._policy,
        "dtype = self.reduce_dtype or → dtype = own or",
    ),
    Mutant(
        "L4: the root is given up after its forward pass, and gathered again at once",
        CROSS,
        shard_home.Splitter.split,
        "None if self.reshard_after_forward else False → self.reshard_after_forward",
    ),
    Mutant(
        "L4: micro-batches of parts are added as if each were an update's mean",
        TUTORIAL,
        fsdp.FSDPRunner.backward,
        "if self._ends else None → if True else None",
    ),
    Mutant(
        "buffers are those of the first rank before each micro-batch",
        test_wrap_fsdp.test_buffers_are_those_of_replicas,
        fsdp.FSDPRunner.forward,
        "if samples.begins: → if True:",
    ),
    Mutant(
        "what one update left out is left out by the next ones",
        unit.test_what_was_left_out_once_comes_back,
        shard_home.ShardHome.note_none,
        "self._came.clear() → pass",
        args={"accumulate": "whole"},
    ),
    Mutant(
        "L47: averages stay as they lay under another setup",
        MOVES,
        values.laid_out,
        "params, opt_state, slots = moved → params, opt_state, slots = *moved[:2], values.slots",
    ),
    Mutant(
        "L47: an optimizer's state stays as it lay under another setup",
        MOVES,
        values.laid_out,
        "params, opt_state, slots = moved"
        " → params, opt_state, slots = moved[0], values.opt_state, moved[2]",
    ),
    Mutant(
        "L47: what is on its way stays as it lay under another setup",
        MOVES,
        layout._mapped,
        "if isinstance(tree, Pending): → if False:",
    ),
    Mutant(
        "L47: what stands in lists stays as it lay under another setup",
        MOVES,
        layout._mapped,
        "if isinstance(tree, (list, tuple)) and → if False and",
    ),
    Mutant(
        "models that ranks have drawn differently are cut, and made one of pieces",
        unit.test_ranks_with_models_of_their_own_are_refused,
        values.laid_out,
        "if before.layout is None: → if False:",
    ),
    Mutant(
        "L47: moments that stand deeper under a parameter's name are whole",
        SHARE,
        layout._mapped,
        "k if k in shapes else name → k if k in shapes else None",
    ),
    Mutant(
        "L47: of what is loaded, moments that stand deeper are whole",
        SHARE,
        elastic._params_of,
        "key if key in params else within → key if key in params else None",
    ),
    Mutant(
        "L45: copies of parts are all saved",
        LOADS,
        commit._placed,
        "(copies[rank], str(box)) → (rank, str(box))",
    ),
    Mutant(
        "L45: a rank reads its part of what another layout saved from its own file alone",
        LOADS,
        elastic._Plan.overlapping,
        "if self.target.within(part)] → if self.target.within(part)][:1]",
    ),
    Mutant(
        "L47: the first rank's part is exported for the whole",
        LOADS,
        export._held,
        "held |= {n: _host(t) → held |= {n: tensors[n]._local_tensor",
    ),
    Mutant(
        "an evaluated model draws as one that is trained",
        unit.test_evaluation_drops_nothing,
        shard_home.lent_in_parts,
        "home.module.eval() → home.module",
    ),
    Mutant(
        "L16: the norm is without what is not split",
        TRAINS,
        clip._total_norm,
        "[*whole, *norms] → norms",
    ),
    Mutant(
        "L16: the largest of all gradients is the sum of each rank's largest",
        TRAINS,
        clip._norm_of_shards,
        "dist.ReduceOp.SUM if finite else dist.ReduceOp.MAX → dist.ReduceOp.SUM",
    ),
    Mutant(
        "L33: gradients that a broken backward pass left are added to the next ones",
        APART,
        shard_home.ShardHome.clear_gradients,
        "split.unsharded_accumulated_grad = None → pass",
    ),
    Mutant(
        "L33: after gradients that nobody took, replicas begin with their own buffers",
        APART,
        ddp.DDPRunner.forward,
        "ddp.require_forward_param_sync = samples.begins → pass",
    ),
    Mutant(
        "copies of parts are not compared",
        unit.test_copies_that_differ_in_a_part_are_told,
        replicas.sums_of,
        "folded(world).along(*axes) → world",
        args={
            "axes": {"dp_replicate": 2, "dp_shard": 2},
            "field": "params",
            "look": "once",
        },
    ),
    Mutant(
        "of parts of copies those of this rank's own row are compared alone",
        unit.test_copies_that_differ_in_a_part_are_told,
        replicas.sums_of,
        "checksum(each) for each in → each[0] * 0 for each in",
        args={
            "axes": {"dp_replicate": 2, "dp_shard": 2},
            "field": "opt_state",
            "look": "once",
        },
    ),
    Mutant(
        "L45: frozen parameters of which ranks have parts are not looked for by their hashes",
        LOADS,
        partial.kept_of,
        "found |= digests(some) → found |= digests({n: here[n]._local_tensor for n in some})",
    ),
]
