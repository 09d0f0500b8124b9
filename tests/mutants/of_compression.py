# SPDX-License-Identifier: Apache-2.0
"""Bugs in compressing gradients."""

from accelfn.checkpoint import commit, manifest
from accelfn.engine import compression, ddp
from accelfn.state import succession
from accelfn.transforms import compress, local_sgd
from tests.laws import test_16_bits, test_compressed_workers, test_compression
from tests.mutants.mutant import Mutant

WORKERS = test_compressed_workers.test_a_worker_compresses_as_a_world_of_its_own

MUTANTS = [
    Mutant(
        "L1: what is left out under fp16 is kept in units of a scale that changes",
        test_compression.test_what_is_left_out_is_not_lost,
        compression.LowRank.weigh,
        "1.0 if self._scale is None else self._scale.to(weight) → 1.0",
    ),
    Mutant(
        "L3: the weight of the losses is rounded as gradients are",
        test_16_bits.test_what_16_bits_can_hold_is_exact,
        ddp.DDPRunner._sum,
        "dtype=torch.float64 → dtype=torch.float16",
    ),
    Mutant(
        "L3: gradients are divided by the weight itself before they are rounded",
        test_16_bits.test_what_16_bits_can_hold_is_exact,
        compression.Narrow.weigh,
        "unit, 1.0 → weight, 1.0",
    ),
    Mutant(
        "L3: totals are not divided by their weight before they are rounded, and overflow",
        test_16_bits.test_what_16_bits_can_hold_is_exact,
        compression.Narrow.weigh,
        "unit, 1.0 → 1.0, 1.0",
    ),
    Mutant(
        "L17: gradients that a scale has made for 16 bits are divided by their weight too",
        test_16_bits.test_16_bits_round_each_rank_once_and_the_sum,
        compression.Narrow.begin,
        "loss_scale is not None → False",
    ),
    Mutant(
        "L17: gradients are divided by the power of 2 below their weight, and overflow sooner",
        test_16_bits.test_a_total_overflows_no_sooner_than_its_mean,
        compression.Narrow.weigh,
        "(mantissa == 0.5) → (mantissa >= 0.5)",
    ),
    Mutant(
        "L1: without any weight, a part of what was left out is neither applied nor kept",
        test_compression.test_nothing_is_lost_where_nothing_counts,
        compression.LowRank.weigh,
        "torch.where(weight > 0, weight / self._ranks.size, 1.0)"
        " → torch.where(weight > 0, weight, 1.0) / self._ranks.size",
    ),
    Mutant(
        "L1: the factor of every matrix has fewer columns than was asked for",
        test_compression.test_full_rank_is_the_plain_mean,
        compression.LowRank._drawn,
        "min(*rows.shape, self._rank) → 1",
    ),
    Mutant(
        "L1: the next gradient goes without what the last one lacked",
        test_compression.test_what_is_left_out_is_not_lost,
        compression.LowRank._matrix,
        "rows + self._errors[name] → rows",
    ),
    Mutant(
        "L3: what is left out is kept of totals, whose weights differ",
        test_compression.test_what_is_left_out_is_not_lost,
        compression.LowRank.weigh,
        "self._unit = torch.where(weight > 0, weight / self._ranks.size, 1.0)"
        " → self._unit = torch.ones_like(weight)",
    ),
    Mutant(
        "L42: the factors of the last update are the engine's, and in no checkpoint",
        test_compression.test_a_cut_run_goes_on_with_what_was_left_out,
        compression.LowRank.begin,
        'dict(slot["q"]) → vars(self).setdefault("kept", {})',
    ),
    Mutant(
        "L45: on another number of ranks, all go on with what the first had left out",
        test_compression.test_other_ranks_take_over_what_was_left_out,
        compress.compress.merge,
        '**first, "error": errors → **first',
    ),
    Mutant(
        "L18: what a skipped update left out is added to the next gradient",
        test_compression.test_a_skipped_update_leaves_what_was_left_out,
        succession.skipped,
        "num_skipped=state.num_skipped + 1,"
        " → num_skipped=state.num_skipped + 1, slots={**state.slots, **update.grads.taken.slots},",
    ),
    Mutant(
        "L6: a compression sends 32 bits where 16 were asked for",
        test_compression.test_bytes_go_down_and_only_the_last_micro_batch_sends,
        compression.Narrow.reduce,
        ".to(self._dtype) → .float()",
    ),
    Mutant(
        "L10: factors of matrices cross workers, sums in 16 bits do not",
        WORKERS,
        compress.compress._compression,
        "state.name,\n        ranks, → state.name, state.world.loss,",
    ),
    Mutant(
        "L10: where workers meet, what was left out is averaged over them, too",
        WORKERS,
        local_sgd.local_sgd._averaged,
        "for name, param in state.params.items() if name in trained] → for name, param in "
        'state.params.items() if name in trained] + [*(state.slots.get("compress") or '
        '{"error": {}})["error"].values()]',
    ),
    Mutant(
        "L18: an update that another worker skips leaves a worker without what was left out",
        WORKERS,
        succession.skipped,
        "num_skipped=state.num_skipped + 1,"
        ' → num_skipped=state.num_skipped + 1, slots={**state.slots, **({"compress": '
        '{**state.slots["compress"], "error": {}}} if state.slots.get("compress") else {})},',
    ),
    Mutant(
        "L42: of what was left out a worker saves its first rank's alone",
        WORKERS,
        commit.divided,
        "held[first].get(name) != held[rank].get(name) → False",
    ),
    Mutant(
        "L42: each rank of a worker goes on with what the first one had left out",
        WORKERS,
        manifest.Manifest.file_of,
        "own = rank_file(rank) → own = rank_file(self.copies.index(self.copies[rank]))",
    ),
]
