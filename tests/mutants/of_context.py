# SPDX-License-Identifier: Apache-2.0
"""Bugs in sequences that are split over ranks, and in which ranks have which role."""

from accelfn.data import dispatch, gather_valid
from accelfn.data.split import _check_world
from accelfn.definition import checks, definition
from accelfn.engine import engine
from accelfn.engine.module import first_look, heads
from accelfn.loop import evaluate
from accelfn.state import mean, views
from accelfn.step import value_and_grad
from accelfn.transforms import context_parallel, ddp
from accelfn.world import axes
from tests.laws import test_context
from tests.mutants.mutant import Mutant
from tests.unit import test_context_parallel as unit

TRAINS = test_context.test_parts_of_sequences_train_what_the_whole_does
COUNTS = test_context.test_each_token_counts_once
LOADS = test_context.test_what_trained_on_parts_goes_on_anywhere
READS = test_context.test_ranks_of_one_batch_read_alike

MUTANTS = [
    Mutant(
        "L3: heads come back in another order than their positions went",
        TRAINS,
        heads._Exchange.forward,
        "torch.cat([*part.reshape(each.shape)], dim=taken)"
        " → torch.cat([*part.reshape(each.shape).flip(0)], dim=taken)",
    ),
    Mutant(
        "L3: gradients of attention count twice",
        TRAINS,
        heads._Exchange.backward,
        "*back → *(2 * each for each in back)",
    ),
    Mutant(
        "L3: of a mask by head each rank takes the first heads",
        TRAINS,
        heads._of_heads,
        "mask.chunk(ranks.size, -3)[ranks.rank] → mask.chunk(ranks.size, -3)[0]",
    ),
    Mutant(
        "L3: attention is never causal where heads are exchanged",
        TRAINS,
        heads.Heads.attend,
        '"attn_mask": mask} → "attn_mask": mask, "is_causal": False}',
    ),
    Mutant(
        "L3: a mask is dropped where heads are exchanged",
        TRAINS,
        heads.Heads.attend,
        '"attn_mask": mask} → "attn_mask": None}',
    ),
    Mutant(
        "L3: attention has torch's own scale where heads are exchanged",
        TRAINS,
        heads.Heads.attend,
        '"attn_mask": mask} → "attn_mask": mask, "scale": None}',
    ),
    Mutant(
        "L3: nothing is dropped in attention where heads are exchanged",
        TRAINS,
        heads.Heads.attend,
        '"attn_mask": mask} → "attn_mask": mask, "dropout_p": 0.0}',
    ),
    Mutant(
        "L1: what ranks of one text count is told as often as there are parts of it",
        test_context.test_counts_are_of_whole_texts,
        value_and_grad._count,
        "definition.world.batch) → definition.world.loss)",
    ),
    Mutant(
        "L50: all ranks along cp draw the same noise for their positions",
        test_context.test_each_part_has_draws_of_its_own,
        engine.Engine._key,
        "loss.rank)) → state.definition.world.batch.rank))",
    ),
    Mutant(
        "L3: all ranks along cp have the first part of a sequence",
        TRAINS,
        context_parallel._Sequence._cut,
        "begins = [piece * size for piece in self._way.pieces] → begins = [0]",
    ),
    Mutant(
        "L3: ranks look at the loss in one piece as often as their own samples ask",
        TRAINS,
        context_parallel._Sequence.check,
        "any(is_positive(row[1]) for row in rows) → bool(told[0, 1])",
    ),
    Mutant(
        "L3: gradients of parts of a sequence are not summed along cp",
        TRAINS,
        ddp.wrap_ddp.engine,
        "ranks = state.definition.copy → ranks = state.world.batch",
    ),
    Mutant(
        "L3: metrics of parts of a sequence are those of one part",
        TRAINS,
        mean.mean,
        "sum_named(pairs, world.loss → sum_named(pairs, world.batch",
    ),
    Mutant(
        "L1: the weight of an update is that of one part of its sequences",
        COUNTS,
        engine.Engine.__init__,
        "definition.copy.size → definition.world.batch.size",
    ),
    Mutant(
        "L45: a model is split along dp_shard alone where cp is there",
        LOADS,
        axes.folded,
        'if axes.get("cp", 1) > 1: → if False:',
    ),
    Mutant(
        "L42: each rank along cp and tp takes samples of its own",
        READS,
        definition.Definition.plan,
        "batch = self.world.batch → batch = self.world",
    ),
    Mutant(
        "a stream that one rank reads is read once for each rank along cp",
        unit.test_one_rank_reads_a_stream_for_all,
        dispatch.read_dispatched,
        "if world.is_main: → if ranks.is_main:",
    ),
    Mutant(
        "positions that a model counts for itself pass",
        unit.test_what_does_not_go_by_position_is_refused,
        context_parallel._Sequence.check,
        "> near * size: → > 9 * size:",
        args={"model": unit.Counting},
    ),
    Mutant(
        "labels that are shifted in parts pass where the sums agree",
        unit.test_labels_that_are_shifted_in_parts_are_refused,
        context_parallel._Sequence.check,
        "if weight != weights or → if",
        args={"loss": unit.loss_of_fewer},
    ),
    Mutant(
        "batches that differ along cp pass",
        unit.test_batches_that_differ_along_cp_are_refused,
        context_parallel._Sequence.check,
        "if not torch.equal(told[:, :2] → if False and torch.equal(told[:, :2]",
        args={"odd": 1},
    ),
    Mutant(
        "a first batch without weight counts as looked at",
        unit.test_what_does_not_count_is_looked_at_later,
        context_parallel._Sequence.check,
        "drawn or any(is_positive(row[1]) for row in rows) → True",
    ),
    Mutant(
        "looking at the loss in one piece draws from the update's numbers",
        unit.test_a_loss_that_draws_is_told_of,
        first_look.untouched,
        "torch.no_grad(), draws.seeded(0, device) → torch.no_grad()",
    ),
    Mutant(
        "looking at the loss in one piece writes buffers",
        unit.test_looking_leaves_no_trace,
        first_look.untouched,
        "b if b is None else b.clone() → b",
    ),
    Mutant(
        "looking at the loss in one piece leaves the model in evaluation mode",
        unit.test_looking_leaves_no_trace,
        first_look.untouched,
        "module.training = was → pass",
    ),
    Mutant(
        "a loss that draws is compared with what it drew before",
        unit.test_a_loss_that_draws_is_told_of,
        context_parallel._Sequence.check,
        "drawn = has_drawn() → drawn = False",
    ),
    Mutant(
        "ranks along an axis that nothing uses train alike, in silence",
        unit.test_an_axis_without_work_is_refused,
        checks.check_axes,
        "fact not in setup.facts → False",
        args={"axis": "cp", "setup": None},
    ),
    Mutant(
        "what is predicted comes once for each rank along cp",
        unit.test_what_is_predicted_and_gathered_comes_once,
        evaluate.predict,
        "batch_ranks, lent = state.world.batch, → batch_ranks, lent = state.world,",
    ),
    Mutant(
        "valid samples are gathered once for each rank along cp",
        unit.test_what_is_predicted_and_gathered_comes_once,
        gather_valid.gather_valid,
        "ranks = world.batch → ranks = world",
    ),
    Mutant(
        "ranks that share samples draw others for them",
        unit.test_what_is_predicted_and_gathered_comes_once,
        views.rng,
        "world.batch.rank → world.rank",
    ),
    Mutant(
        "samples are split between ranks that share them",
        unit.test_ranks_of_one_sample_are_not_split_between,
        _check_world,
        "world.batch is not world: → False:",
    ),
    Mutant(
        "heads of keys that cannot be shared out are torch's error",
        unit.test_attention_that_cannot_be_shared_is_refused,
        heads._check,
        "given.three.items() → [*given.three.items()][:1]",
        args={"model": unit.Sharing, "words": "1 heads of the key"},
    ),
    Mutant(
        "a look at long sequences is at as many positions as there may be",
        unit.test_a_look_at_long_sequences_is_at_their_beginning,
        context_parallel._Sequence.check,
        "min(_MANY // num * num, length) → min(_MANY, length)",
        args={"ring": False},
    ),
]
