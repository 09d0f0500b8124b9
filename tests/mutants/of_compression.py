# SPDX-License-Identifier: Apache-2.0
"""Bugs in compressing gradients."""

from accelfn import update
from accelfn.engine import compression, ddp
from accelfn.transforms import compress
from tests.laws import test_compression
from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        name="the weight in 16 bits",
        says="the weight of the losses is rounded as gradients are",
        law="L3",
        test=test_compression.test_what_16_bits_can_hold_is_exact,
        place=ddp.DDPRunner._sum,
        old="dtype=torch.float64",
        new="dtype=torch.float16",
    ),
    Mutant(
        name="a unit that rounds",
        says="gradients are divided by the weight itself before they are rounded",
        law="L3",
        test=test_compression.test_what_16_bits_can_hold_is_exact,
        place=compression.Narrow.weigh,
        old="unit, 1.0",
        new="weight, 1.0",
    ),
    Mutant(
        name="totals in 16 bits",
        says="totals are not divided by their weight before they are rounded, and overflow",
        law="L3",
        test=test_compression.test_what_16_bits_can_hold_is_exact,
        place=compression.Narrow.weigh,
        old="unit, 1.0",
        new="1.0, 1.0",
    ),
    Mutant(
        name="a scale's work undone",
        says="gradients that a scale has made for 16 bits are divided by their weight too",
        law="L17",
        test=test_compression.test_16_bits_round_each_rank_once_and_the_sum,
        place=compression.Narrow.begin,
        old="loss_scale is not None",
        new="False",
    ),
    Mutant(
        name="a rank short",
        says="the factor of every matrix has fewer columns than was asked for",
        law="L1",
        test=test_compression.test_full_rank_is_the_plain_mean,
        place=compression.LowRank._drawn,
        old="min(*rows.shape, self._rank)",
        new="1",
    ),
    Mutant(
        name="what is left out is lost",
        says="the next gradient goes without what the last one lacked",
        law="L1",
        test=test_compression.test_what_is_left_out_is_not_lost,
        place=compression.LowRank._matrix,
        old="rows + self._errors[name]",
        new="rows",
    ),
    Mutant(
        name="left out of a total",
        says="what is left out is kept of totals, whose weights differ",
        law="L3",
        test=test_compression.test_what_is_left_out_is_not_lost,
        place=compression.LowRank.weigh,
        old="self._unit = torch.where(weight > 0, weight, 1.0) / self._world.size",
        new="self._unit = torch.ones_like(weight)",
    ),
    Mutant(
        name="memory beside the slot",
        says="the factors of the last update are the engine's, and in no checkpoint",
        law="L42",
        test=test_compression.test_a_cut_run_goes_on_with_what_was_left_out,
        place=compression.LowRank.begin,
        old='dict(slot["q"])',
        new="self._factors",
    ),
    Mutant(
        name="one rank's memory for all",
        says="on another number of ranks, all go on with what the first had left out",
        law="L45",
        test=test_compression.test_other_ranks_take_over_what_was_left_out,
        place=compress.compress.merge,
        old='**first, "error": errors',
        new="**first",
    ),
    Mutant(
        name="a skipped update is remembered",
        says="what a skipped update left out is added to the next gradient",
        law="L18",
        test=test_compression.test_a_skipped_update_leaves_what_was_left_out,
        place=update._skipped,
        old="kept = dict(state.slots)",
        new="kept = {**state.slots, **grads.slots}",
    ),
    Mutant(
        name="compressed to 32 bits",
        says="a compression sends 32 bits where 16 were asked for",
        law="L6",
        test=test_compression.test_bytes_go_down_and_only_the_last_micro_batch_sends,
        place=compression.Narrow.reduce,
        old=".to(self._dtype)",
        new=".float()",
    ),
]
