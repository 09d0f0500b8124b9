# SPDX-License-Identifier: Apache-2.0
"""Bugs in layers that are split over ranks, and in how parts are put together."""

from accelfn.checkpoint import slices
from accelfn.definition import layout
from accelfn.engine import agreement, engine, home
from accelfn.engine.module import (
    apart,
    cross_entropy,
    crossing,
    looks,
    parallel_layers,
    plan,
    scores,
)
from accelfn.engine.optimizer import trial
from accelfn.step import sync_grads
from accelfn.transforms import clip, tensor_parallel
from tests.laws import test_scores as scores_laws
from tests.laws import test_shard_histories
from tests.laws import test_tensor_parallel as laws
from tests.mutants.mutant import Mutant
from tests.unit import test_tensor_parallel as unit

TRAINS = laws.test_parts_of_layers_train_what_the_whole_does
COUNTS = laws.test_each_token_counts_once
LOADS = laws.test_what_is_saved_in_one_layout_is_loaded_in_another
MOVES = laws.test_another_plan_and_back_changes_nothing
STAYS = laws.test_what_all_ranks_have_stays_the_same
DRAWS = laws.test_what_a_loss_draws_is_what_one_rank_draws
SHARE = laws.test_each_rank_has_its_part_of_layers
SKIPS = laws.test_an_update_is_skipped_on_all_ranks_or_none
APART = test_shard_histories.test_states_of_split_layers_do_not_meet
ENTROPY = scores_laws.test_the_entropy_of_parts_is_that_of_the_whole
OTHERS = scores_laws.test_every_other_function_sees_the_whole
BY_HAND = laws.test_parts_are_reduced_by_hand_alike

MUTANTS = [
    Mutant(
        "L33: layers compute with the parts of the state that was bound first",
        APART,
        home.ReplicaHome.bind,
        "param.data = params[name] → param.data = param.data",
    ),
    Mutant(
        "L33: where a layer fails whose gradients ranks share, it is left with others' parameters",
        APART,
        parallel_layers.share_gradients,
        "put_back, always_call=True → put_back",
    ),
    Mutant(
        "L3: ranks do not add up the gradients of what they are given alike",
        TRAINS,
        crossing._Hand.backward,
        "summed(gradients[0] → handed(gradients[0]",
    ),
    Mutant(
        "L3: the sum of ranks' features has the gradients of all of them",
        TRAINS,
        crossing._Sum.backward,
        "handed(gradients[0] → summed(gradients[0]",
    ),
    Mutant(
        "L3: of gathered features each rank has the gradient of the first",
        TRAINS,
        crossing._Take.forward,
        "[ranks.rank] → [0]",
    ),
    Mutant(
        "L3: the vector of padding is trained where words are split",
        TRAINS,
        parallel_layers.VocabularyEmbedding.forward,
        'cast("int", padding) - begin if has_padding else None → None',
    ),
    Mutant(
        "L3: each rank looks up the words of the first",
        TRAINS,
        parallel_layers.VocabularyEmbedding.forward,
        "begin = ranks.rank * count → begin = 0",
    ),
    Mutant(
        "L3: words that another rank has are those of this rank's first",
        TRAINS,
        parallel_layers.VocabularyEmbedding.forward,
        "vectors.masked_fill(~here.unsqueeze(-1), 0) → vectors",
    ),
    Mutant(
        "what was entered once stands for another input",
        unit.test_layers_of_other_inputs_have_their_own_gradients,
        parallel_layers.Layers.enter,
        "kept is not None and kept[0] is given → kept is not None",
    ),
    Mutant(
        "L45: each rank saves its part of a layer in the place of the first",
        LOADS,
        slices.slice_of,
        "tuple(offset), tuple(size)) → (0,) * len(shape), tuple(size))",
    ),
    Mutant(
        "L47: in another plan each rank has the first features",
        MOVES,
        layout.Layout.cut,
        "min(begin - there[dim], part.shape[dim]) → 0",
    ),
    Mutant(
        "L4: a part that was computed whole is cut as if it were the whole",
        BY_HAND,
        layout.Layout.cut,
        "begin - there[dim] → max(begin - 2 * there[dim], 0)",
    ),
    Mutant(
        "L4: what ranks reduced by hand lies as if nothing were split",
        BY_HAND,
        sync_grads.sync_grads,
        "if layout is not None: → if False:",
    ),
    Mutant(
        "L4: gradients of parts of layers are whole tensors",
        SHARE,
        layout.Layout.laid,
        "if name not in self.of_layers.cuts: → if True:",
    ),
    Mutant(
        "L1: the weight of an update is that of all ranks, those along tp too",
        COUNTS,
        engine.Engine.__init__,
        "definition.copy.size → definition.world.size",
    ),
    Mutant(
        "L14: a norm leaves out what is cut along one axis and then another",
        TRAINS,
        clip._norm_of_shards,
        "if not placement.is_replicate(): → if placement.is_shard():",
    ),
    Mutant(
        "L33: all ranks drop the same features between layers",
        STAYS,
        apart.Apart.draw,
        "place, self._ranks.rank → place",
    ),
    Mutant(
        "L33: ranks go on drawing each for itself behind a row layer",
        STAYS,
        apart.Apart.draw_alike,
        "each.set_state(state) → pass",
    ),
    Mutant(
        "L50: drawing between layers moves the generator of all ranks",
        DRAWS,
        apart.Apart.draw_alike,
        "if has_drawn: → if True:",
    ),
    Mutant(
        "L47: each rank has all of what its plan splits",
        SHARE,
        plan.cut_of,
        "return dim if dim is not None and dim < meta.ndim else None → return None",
    ),
    Mutant(
        "L18: ranks along tp skip each for itself",
        SKIPS,
        tensor_parallel.tensor_parallel.layout,
        'return None if dim is None else {"tp": dim} → return None',
    ),
    Mutant(
        "a column layer whose features go on in parts passes",
        unit.test_a_model_that_is_another_in_parts_is_refused,
        tensor_parallel._check,
        "if still_open is not None: → if False:",
        args={"model": unit.Open, "said": "no row layer follows"},
    ),
    Mutant(
        "heads that a model counts for itself pass",
        unit.test_a_model_that_is_another_in_parts_is_refused,
        looks.Looks._fit,
        "distance <= far * length → True",
        args={"model": unit.Heads, "said": "this rank's features"},
    ),
    Mutant(
        "what leaks from between the layers passes",
        unit.test_a_model_that_is_another_in_parts_is_refused,
        tensor_parallel._check,
        "distance > (far → distance > (9e9 * far",
        args={"model": unit.Leaking, "said": "of whole layers"},
    ),
    Mutant(
        "gradients of what stands between the layers are those of a part",
        unit.test_a_model_that_is_another_in_parts_is_refused,
        agreement.check_gradients,
        "if float(on_host(far)) > _FAR * length: → if False:",
        args={"model": unit.Scaled, "said": "other gradients"},
    ),
    Mutant(
        "gradients that were refused once pass the second time",
        unit.test_what_was_refused_is_refused_again,
        engine.Engine._found,
        "check_gradients(self._home → self._has_compared = True; check_gradients(self._home",
    ),
    Mutant(
        "batches that differ along tp pass",
        unit.test_batches_that_differ_along_tp_are_refused,
        tensor_parallel._check,
        "if not torch.equal( → if False and torch.equal(",
    ),
    Mutant(
        "a parameter that is tied to one of another word passes",
        unit.test_what_a_model_has_not_is_refused,
        plan._check_ties,
        "if cut_of(plan, known, param) != → if False and cut_of(plan, known, param) !=",
        args={"plan": {"head": "gathered"}, "model": unit.Tied, "said": "are one"},
    ),
    Mutant(
        "a layer with a forward of its own loses it",
        unit.test_what_a_model_has_not_is_refused,
        plan._check_layer,
        "if type(module) not in kinds: → if not isinstance(module, tuple(kinds)):",
        args={"plan": {"up": "column"}, "model": unit.own, "said": "Own"},
    ),
    Mutant(
        "an optimizer that looks at rows steps columns",
        unit.test_an_optimizer_of_rows_is_refused,
        trial._differing,
        "part=(dim, half) → part=(0, half)",
    ),
    Mutant(
        "layers of one input each add up its gradient",
        unit.test_layers_of_one_input_add_up_its_gradient_once,
        parallel_layers.Layers.enter,
        "if kept is not None and → if False and",
    ),
    Mutant(
        "what the first look draws is what the update draws",
        unit.test_looking_leaves_no_trace,
        tensor_parallel._check,
        "with untouched(model, ranks.device), Coarsest() as coarsest:"
        " → with torch.no_grad(), Coarsest() as coarsest:",
    ),
    Mutant(
        "L3: parts of a sequence have the gradient of what one rank made of it",
        TRAINS,
        crossing._GatherAndHand.backward,
        "summed_and_taken(gradients[0] → taken(gradients[0]",
    ),
    Mutant(
        "L3: a sum that goes on in parts has the gradient of a part",
        TRAINS,
        crossing._SumAndTake.backward,
        "gathered_and_handed(gradients[0], ctx.dim, ctx.ranks)"
        " → gradients[0].repeat_interleave(ctx.ranks.size, ctx.dim)",
    ),
    Mutant(
        "L3: each rank goes on with the first positions of a sum",
        TRAINS,
        crossing._SumAndTake.forward,
        "torch.cat(whole.chunk(ranks.size, dim)).contiguous()"
        " → torch.cat(whole.chunk(ranks.size, dim)[:1] * ranks.size).contiguous()",
    ),
    Mutant(
        "L3: the bias of a row layer has the gradient of some positions",
        TRAINS,
        parallel_layers.Layers.part,
        "or not self.sequence or → or True or",
    ),
    Mutant(
        "L50: ranks go on drawing each for itself behind a head",
        DRAWS,
        parallel_layers.Layers.end_sequence,
        "if self.sequence: → if False:",
    ),
    Mutant(
        "L33: ranks drop the same of different positions",
        STAYS,
        parallel_layers.Layers.end_region,
        "if not self.sequence: → if True:",
    ),
    Mutant(
        "what is computed again in the midst of a stretch draws anew",
        unit.test_what_is_computed_again_drops_what_it_dropped,
        apart.Apart.draw,
        "if first.initial_seed() in self._alike: → if self._alike:",
        args={"again": ("block",), "sequence": False},
    ),
    Mutant(
        "gradients that all ranks have whole are summed",
        unit.test_a_word_in_the_wrong_place_is_refused,
        parallel_layers._check_stands,
        "(layers.split if by_position else layers.open) is not None → True",
        args={"word": {"norm": "replicated"}, "said": "does not stand between"},
    ),
    Mutant(
        "a loss of some positions passes for that of all",
        unit.test_ranks_have_their_positions_between_layers_and_words_behind_the_head,
        tensor_parallel._check,
        'msg = f"af.tensor_parallel: {name} is computed of parts → return; msg = f"{name}',
    ),
    Mutant(
        "L3: the largest score is that of this rank's words",
        ENTROPY,
        cross_entropy._largest,
        "dist.all_reduce(largest → dist.all_reduce(largest.clone()",
        args={"way": scores_laws.FLAT[0]},
    ),
    Mutant(
        "L3: a word that another rank has is this rank's first",
        ENTROPY,
        cross_entropy._due,
        ".squeeze(-1).masked_fill(~here, 0) → .squeeze(-1)",
        args={"way": scores_laws.FLAT[0]},
    ),
    Mutant(
        "L3: labels are smoothed over the words of a rank",
        ENTROPY,
        cross_entropy.cross_entropy,
        "number, word = part.shape[-1] * ranks.size, → number, word = part.shape[-1],",
        args={"way": scores_laws.FLAT[0]},
    ),
    Mutant(
        "L3: words are weighed as those of the first rank",
        ENTROPY,
        cross_entropy.cross_entropy,
        "weight.chunk(ranks.size)[ranks.rank] → weight.chunk(ranks.size)[0]",
        args={"way": scores_laws.FLAT[0]},
    ),
    Mutant(
        "L3: rows that do not count are divided by",
        ENTROPY,
        cross_entropy.cross_entropy,
        "log, weights = total.log(), counts.to(part.dtype)"
        " → log, weights = total.log(), torch.ones_like(total)",
        args={"way": scores_laws.FLAT[0]},
    ),
    Mutant(
        "L3: a number that scales scores has the gradient of some words",
        ENTROPY,
        scores._each,
        "crossing.handed(each, ranks) if each.requires_grad else each → each",
        args={"way": scores_laws.FLAT[0]},
    ),
    Mutant(
        "L3: some words of a rank's stand for some of all words",
        OTHERS,
        scores._chosen,
        "if _num_taken(index) >= part.ndim: → if False:",
        args={"name": "a word"},
    ),
    Mutant(
        "L3: another function is given a rank's own scores",
        OTHERS,
        scores._whole,
        "crossing.gathered(_part(leaf), leaf._dim, leaf._ranks) → _part(leaf)",
        args={"name": "argmax"},
    ),
    Mutant(
        "L47: scores of all words are gathered to change their shape",
        scores_laws.test_no_rank_has_all_scores,
        scores._viewed,
        "if last == -1 and rest > 0: → if True: return NotImplemented\n    if last == -1:",
        args={"each": "as they are", "way": scores_laws.FLAT[0]},
    ),
    Mutant(
        "a letter that is none is one that no rank has",
        unit.test_a_letter_that_is_none_is_refused_as_by_torch,
        cross_entropy._due,
        "is_word & ~here, 0) → ~here, 0)",
    ),
]
