# SPDX-License-Identifier: Apache-2.0
"""Bugs that strangers planted and no test found, until it was written."""

import torch

from accelfn.collectives import averages, few_bits
from accelfn.data import mixed
from accelfn.engine import buffers
from accelfn.state import grads
from accelfn.step import stages
from accelfn.testing.comparing import differences
from accelfn.transforms import precision
from accelfn.world import slurm
from tests.mutants.mutant import Mutant
from tests.unit import test_buffers, test_plain_slots
from tests.unit import test_seen_by_nobody as tests

MUTANTS = [
    Mutant(
        "a weight that is a tensor may be 0 on all ranks, and divides",
        tests.test_a_mean_of_no_weight_is_the_plain_one,
        averages._may_be_zero,
        "return isinstance(weight, torch.Tensor) or weight == 0"
        " → return not isinstance(weight, torch.Tensor) and weight == 0",
        args={"weight": torch.tensor(0.0)},
    ),
    Mutant(
        "rows of a mix stand where they were read, and not where they belong",
        tests.test_rows_of_a_mix_stand_where_their_indices_say,
        mixed.Joined.batch,
        "torch.cat([here for here, _ in pieces]).argsort()"
        " → torch.cat([here for here, _ in pieces])",
    ),
    Mutant(
        "NaN is equal to any number",
        tests.test_nan_is_equal_to_nan_alone,
        differences.Comparison._unequal,
        "wide[0].isnan() & wide[1].isnan() → wide[0].isnan() | wide[1].isnan()",
        args={"options": {"rtol": 0.1}},
    ),
    Mutant(
        "all steps of a job of Slurm meet at one port",
        tests.test_steps_of_one_job_meet_at_ports_of_their_own,
        slurm._port_of_job,
        "1009 * step → 0 * step",
    ),
    Mutant(
        "views of gradients are not used up with them",
        tests.test_views_of_gradients_are_used_up_with_them,
        grads.Grads.map,
        "if have_memory_in_common(tensors.values(), self.tensors.values()): → if False:",
    ),
    Mutant(
        "an overflow in a part of the gradients is one rank's own affair",
        tests.test_an_overflow_in_one_rank_s_part_skips_the_update_of_all,
        precision.autocast.grads,
        "if not update.replicated: → if not grads.reduced:",
    ),
    Mutant(
        "a buffer that was assigned in a pass changes with what it was set to",
        test_buffers.test_what_the_forward_pass_assigns_to_a_buffer_is_copied,
        buffers.Buffers._take,
        "current.detach().clone() → current.detach()",
        args={"case": "the weight"},
    ),
    Mutant(
        "a slot may have tensors that updates write into",
        test_plain_slots.test_a_slot_of_the_state_s_own_tensors_is_refused,
        stages._check_slots,
        "if count & (count - 1) == 0: → if False:",
    ),
    Mutant(
        "a buffer that was assigned in a pass is the caller's tensor in the next",
        tests.test_a_batch_that_a_model_keeps_is_not_written_to,
        buffers.Buffers._take,
        "current.detach().clone() → current.detach()",
    ),
    Mutant(
        "an exponent that a byte does not hold is another one",
        tests.test_numbers_beyond_the_exponents_of_a_byte_are_the_nearest_that_there_are,
        few_bits.encoded,
        "exponent = exponent.clamp(_SMALLEST, _LARGEST) → pass",
        args={"bits": 8},
    ),
]
