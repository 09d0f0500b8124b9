# SPDX-License-Identifier: Apache-2.0
"""Bugs in attention by a ring, and in the blocks of keys that its ranks meet."""

import torch

import accelfn as af
from accelfn.collectives import around
from accelfn.engine.module import attention, blocks, ring
from accelfn.transforms import context_parallel
from tests.laws import test_blocks, test_context
from tests.mutants.mutant import Mutant
from tests.unit import test_context_parallel as contexts
from tests.unit import test_ring as unit

TRAINS = test_context.test_parts_of_sequences_train_what_the_whole_does
JOINS = test_blocks.test_blocks_that_are_joined_are_attention_to_all
CAUSAL = test_blocks.test_a_block_may_be_causal
NOTHING = test_blocks.test_who_sees_nothing_gets_nothing
PRECISE = unit.test_a_ring_computes_in_the_dtype_of_autocast
REFUSED = unit.test_attention_that_no_ring_has_is_refused
DROPPING = {"model": unit.Dropping, "words": "leave out ring"}
SPREADING = {"model": unit.Spreading, "words": "cannot attend to a key"}
DOUBLING = {"model": unit.Doubling, "words": "2 queries and 4 keys"}

MUTANTS = [
    Mutant(
        "L3: a rank's first piece sees the last pieces of ranks before it",
        TRAINS,
        ring._Meetings.places,
        "return _ALL, slice(half) → return _ALL, _ALL",
    ),
    Mutant(
        "L3: no query of a rank sees keys of ranks behind it",
        TRAINS,
        ring._Meetings.places,
        "return slice(half, None), _ALL → return slice(half, None), slice(half)",
    ),
    Mutant(
        "L3: a rank's first piece sees its last one",
        TRAINS,
        ring._Meetings.block,
        "self.is_causal and owner == self.ranks.rank → False",
    ),
    Mutant(
        "L3: attention is never causal in a ring",
        TRAINS,
        ring.Ring.attend,
        "is_causal=given.is_causal → is_causal=False",
    ),
    Mutant(
        "L3: attention has torch's own scale in a ring",
        TRAINS,
        ring.Ring.attend,
        "if given.scale is None else given.scale → if True else given.scale",
    ),
    Mutant(
        "L3: a rank has one piece twice",
        TRAINS,
        ring._pieces,
        "return rank, 2 * size - 1 - rank → return rank, rank",
    ),
    Mutant(
        "L3: keys are masked as those of the rank before",
        TRAINS,
        around.owners,
        "(ranks.rank - hop) % ranks.size → (ranks.rank + hop) % ranks.size",
    ),
    Mutant(
        "L3: a mask is one of positions in order, not of a rank's pieces",
        TRAINS,
        ring.Ring._masks,
        "mask, -2, self.num_pieces, self.pieces → mask, -2, self.num_pieces, (0, 1)",
    ),
    Mutant(
        "L3: what a mask of truths hides is seen in a ring",
        TRAINS,
        ring.Ring._masks,
        "masked_fill(~mask → masked_fill(mask",
    ),
    Mutant(
        "L3: a mask that is learned learns nothing in a ring",
        TRAINS,
        ring._Attention.backward,
        "if learned[hop]: → if False:",
    ),
    Mutant(
        "L3: a mask learns of the next meeting",
        TRAINS,
        ring._Attention.backward,
        "tuple(of_masks) → (*of_masks[1:], of_masks[0])",
    ),
    Mutant(
        "L3: gradients of keys stay with the rank that they met last",
        TRAINS,
        around.Homewards.arrived,
        "self._begun if self._coming is None else self._coming.arrived() → self._begun",
    ),
    Mutant(
        "L3: gradients of keys are those of the last meeting alone",
        TRAINS,
        around.Homewards.add,
        "whole[:, :, columns] += part → whole.zero_(); whole[:, :, columns] += part",
    ),
    Mutant(
        "L3: of queries the gradient is that of the last meeting",
        TRAINS,
        ring._Attention.backward,
        "of_query[:, :, rows] += three[0] → of_query[:, :, rows] = three[0]",
    ),
    Mutant(
        "L3: what is seen of later blocks is not weighed",
        TRAINS,
        blocks.join,
        "seen.mul_(ours).add_(more * theirs) → seen.mul_(ours).add_(more)",
    ),
    Mutant(
        "L3: the weight of what was seen is that of the first block",
        TRAINS,
        blocks.join,
        "lse.copy_(both) → pass",
    ),
    Mutant(
        "L3: a query that sees nothing in a block is taken to weigh one there",
        JOINS,
        blocks.Block.attended,
        "lse.masked_fill(~sees, _NOTHING) → lse",
    ),
    Mutant(
        "L3: heads that share keys have the gradient of one of them",
        JOINS,
        blocks.Block._summed,
        ".sum(2) → [:, :, 0]",
    ),
    Mutant(
        "L3: heads that share keys take them in turns",
        JOINS,
        blocks._shared,
        "each.repeat_interleave(shared_by, 1) → each.repeat(1, shared_by, 1, 1)",
    ),
    Mutant(
        "L3: products without a kernel have no mask",
        JOINS,
        blocks.Block._products,
        "products = products + self.mask → pass",
    ),
    Mutant(
        "L3: gradients without a kernel are not scaled",
        JOINS,
        blocks.Block.gradients_with_mask,
        "products @ key * self.scale → products @ key",
    ),
    Mutant(
        "L3: gradients without a kernel forget that shares add up to one",
        JOINS,
        blocks.Block.gradients_with_mask,
        " - (upstream * seen).sum(-1, keepdim=True) → ",
    ),
    Mutant(
        "L3: products without a kernel are never causal",
        CAUSAL,
        blocks.Block._products,
        "if self.is_causal: → if False:",
    ),
    Mutant(
        "L3: a kernel is never causal",
        CAUSAL,
        blocks._OnHost.attended,
        "is_causal=block.is_causal → is_causal=False",
    ),
    Mutant(
        "L3: gradients of a kernel are never causal",
        CAUSAL,
        blocks._OnHost.gradients,
        "block.is_causal → False",
    ),
    Mutant(
        "L3: who sees nothing gets no number",
        NOTHING,
        blocks.finite,
        "lse.masked_fill(lse == _NOTHING, 0.0) → lse",
        args={"features": 4},
    ),
    Mutant(
        "a ring computes in float32 under autocast",
        PRECISE,
        ring._as_autocast,
        "tensor.to(torch.get_autocast_dtype(kind)) if enabled else tensor → tensor",
        args={"given": torch.float32, "precision": (af.autocast("bf16"),)},
    ),
    Mutant(
        "a ring drops what it attends to at each meeting anew",
        REFUSED,
        ring._check,
        "if given.dropout_p: → if False:",
        args=DROPPING,
    ),
    Mutant(
        "a ring spreads keys over heads as nobody asked",
        REFUSED,
        ring._check,
        "(shared_by == 1 or given.enable_gqa) → True",
        args=SPREADING,
    ),
    Mutant(
        "a causal ring takes keys of no position",
        REFUSED,
        ring._check,
        "(given.is_causal and num_queries != num_keys) → (False)",
        args=DOUBLING,
    ),
    Mutant(
        "a causal ring takes fewer keys than queries",
        REFUSED,
        ring._check,
        "(given.is_causal and num_queries != num_keys)"
        " → (given.is_causal and num_queries < num_keys)",
        args={"model": unit.Halving, "words": "4 queries and 2 keys"},
    ),
    Mutant(
        "numbers in 64 bits lose theirs in a ring under autocast",
        PRECISE,
        ring._as_autocast,
        "tensor.dtype is torch.float64 or not → not",
        args={"given": torch.float64, "precision": (af.autocast("bf16"),)},
    ),
    Mutant(
        "a ring's part is one piece, so that late ranks compute most",
        unit.test_a_ring_has_two_pieces_a_rank,
        context_parallel._Sequence._cut,
        "begins = [piece * size for piece in self._way.pieces]"
        " → begins = [(2 * self._ranks.rank + i) * size for i in (0, 1)]",
    ),
    Mutant(
        "keys go round once more than they are looked at",
        unit.test_keys_go_round_and_gradients_come_home,
        around.around,
        "coming = _Passed(held, ranks, label)"
        " → _Passed(held, ranks, label).arrived(); coming = _Passed(held, ranks, label)",
    ),
    Mutant(
        "the weights of blocks on GPUs are in 16 bits",
        unit.test_the_kernel_of_gpus_is_called_as_torch_declares_it,
        blocks._OnCuda.attended,
        "return seen, lse → return seen, lse.half()",
        args={"is_causal": False},
    ),
    Mutant(
        "L3: kernels take features to lie side by side where they do not",
        JOINS,
        blocks._of_each_head,
        "t if t.stride(-1) == 1 else t.contiguous() → t",
    ),
    Mutant(
        "who is hidden from all by a number sees a sum",
        unit.test_who_is_hidden_from_all_by_a_number_sees_a_mean,
        ring.Ring._masks,
        "rows = rows - finite(rows.detach().amax(-1, keepdim=True)) → pass",
        args={"value": -1e9},
    ),
    Mutant(
        "a mask is rounded to the dtype of queries",
        unit.test_a_mask_keeps_its_precision,
        ring.Ring._masks,
        "mask = _as_autocast(mask)[ → mask = mask.to(dtype)[",
    ),
    Mutant(
        "a kernel goes back from numbers of two dtypes",
        unit.test_a_mask_keeps_its_precision,
        blocks.Block._kernel,
        "self.mask.dtype is not self.query.dtype → False",
    ),
    Mutant(
        "layers that torch runs again attend to a part alone",
        REFUSED,
        attention.Attending.__torch_function__,
        "if self._with_gradients and _may_run_again(): → if False:",
        args={
            "model": unit.partial(unit.Answering, unit.by_function),
            "words": "run by torch.utils.checkpoint",
        },
    ),
    Mutant(
        "what af.checkpoint_activations runs again is refused",
        contexts.test_what_is_computed_again_sees_all_positions,
        attention._refuse_rerun,
        'and frame.f_locals["context_fn"] is noop_context_fn → and True',
    ),
    Mutant(
        "a teacher's attention is refused",
        unit.test_what_is_not_trained_may_attend_without_gradients,
        attention._refuse_rerun,
        "if frame.f_code is CheckpointFunction.forward.__code__ → if frame.f_back is None",
        args={"setup": unit.RING},
    ),
    Mutant(
        "values of other heads than keys have wrong gradients",
        REFUSED,
        ring._check,
        "is_fit = is_fit and key.shape[: POSITIONS + 1] == value.shape[: POSITIONS + 1] → pass",
        args={
            "model": unit.partial(unit.Answering, unit.with_heads_of_values),
            "words": "cannot attend to a key",
        },
    ),
    Mutant(
        "a look at fewer positions fails where a mask is for all",
        unit.test_a_mask_of_all_positions_is_seen_whole,
        context_parallel._Sequence.check,
        "if few == length: → if True:",
        args={"setup": unit.RING},
    ),
]
