# SPDX-License-Identifier: Apache-2.0
"""Bugs that show where two transforms have a say in one field, or one is odd."""

from accelfn.collectives import averages
from accelfn.definition.explanation import _piped
from accelfn.engine import building, compression, ddp
from accelfn.state import grads, hyper, succession, update
from accelfn.step import value_and_grad
from accelfn.transforms import accumulate, clip, ema
from tests.laws import test_dtypes, test_flow, test_pairs, test_skipping
from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "L30: the leftmost transform of losses is the innermost",
        test_flow.test_wrappers_nest,
        value_and_grad.wrap_loss,
        'reversed(setup.owners["loss"]) → setup.owners["loss"]',
        args={"field": "loss"},
    ),
    Mutant(
        "L30: the leftmost transform of runners is the innermost",
        test_pairs.test_each_field_has_its_order,
        building.build,
        'reversed(definition.setup.owners["runner"])'
        ' → definition.setup.owners["runner"]',
    ),
    Mutant(
        "L30: each is given the state's own parameters to evaluate, not the last one's",
        test_flow.test_values_flow_from_the_left,
        update.through,
        """\
(value, slot, update)
→
(state.params if field == "eval_params" else value, slot, update)
""",
        args={"field": "eval_params"},
    ),
    Mutant(
        "L17: of several that scale losses only the last does",
        test_flow.test_loss_scales_are_multiplied,
        update.through,
        """\
(value, slot, update)
→
(torch.ones(()) if field == "loss_scale" else value, slot, update)
""",
    ),
    Mutant(
        "L30: a rate for all groups leaves one that was set for a group before",
        test_flow.test_the_last_one_that_sets_a_hyperparameter_wins,
        hyper.laid_over,
        "planned[i, key] = value"
        " → planned[i, key] = planned.get((i, key), value) if isinstance(where, str) else value",
    ),
    Mutant(
        "L30: of parameter groups of one name a transform sets the first alone",
        test_flow.test_the_last_one_that_sets_a_hyperparameter_wins,
        hyper._chosen,
        "    return found →     return found[:1]",
    ),
    Mutant(
        "L30: a size of micro-batches wins over a number that a later transform gives",
        test_flow.test_the_last_accumulation_cuts,
        accumulate.accumulate.data,
        ", micro_batch_size=None → ",
    ),
    Mutant(
        "L18: a skipped update leaves slots as `grads` had made them",
        test_pairs.test_each_has_its_own_slot,
        succession.skipped,
        "num_skipped=state.num_skipped + 1,"
        " → num_skipped=state.num_skipped + 1, slots=update.slots,",
    ),
    Mutant(
        "L18: after_skip is given the slot that `grads` was given, not what it gave",
        test_pairs.test_each_has_its_own_slot,
        succession.through_state,
        "update.slots.get(owner.name) → state.slots.get(owner.name)",
    ),
    Mutant(
        "L33: a transform that gives None for its slot gets its last one again",
        test_pairs.test_each_has_its_own_slot,
        update.with_own,
        "if slot is None and name not in slots: → if slot is None:",
    ),
    Mutant(
        "L30: explain() prints values that flow from the right",
        test_pairs.test_explain_prints_what_is_called,
        _piped,
        "owners[field] → owners[field][::-1]",
    ),
    Mutant(
        "L18: beside a wish that ranks share, one of a single rank is not asked about",
        test_skipping.test_any_wish_of_any_rank_skips_once,
        grads.Skip.__or__,
        "self.agreed and other.agreed → self.agreed or other.agreed",
    ),
    Mutant(
        "L21: of a complex gradient half of the numbers cross the ranks",
        test_dtypes.test_any_dtype_and_shape,
        ddp._laid_out,
        "torch.view_as_complex(part.view(param.numel(), 2)) → part[: param.numel()]",
        args={"row": "compress, powersgd"},
    ),
    Mutant(
        "L21: PowerSGD projects complex matrices onto what is no basis of theirs",
        test_dtypes.test_any_dtype_and_shape,
        compression.LowRank._approximate_,
        "basis @ factor.mH → basis @ factor.T",
        args={"row": "compress, powersgd"},
    ),
    Mutant(
        "L15: the norm of gradients in 16 bits is one, and may be infinite",
        test_dtypes.test_a_norm_is_not_kept_in_16_bits,
        clip._norms_of_16_bits,
        "if not narrow: → if True:",
    ),
    Mutant(
        "L10: ranks are averaged by weights that are rounded to the parameters' dtype",
        test_dtypes.test_ranks_are_averaged_by_any_weight,
        averages._average_bucket_,
        "wide = dtype if dtype.itemsize >= 4 else torch.float32 → wide = dtype",
    ),
    Mutant(
        "L20: the average of parameters in 16 bits is kept in these, and stands still",
        test_dtypes.test_an_average_moves_in_any_dtype,
        ema.ema.init,
        "param.float() if _is_narrow(param) else param.clone() → param.clone()",
    ),
]
