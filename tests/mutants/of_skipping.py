# SPDX-License-Identifier: Apache-2.0
"""Bugs in loss scaling, in skipping updates, and in counting before the forward pass."""

from accelfn.base import lists
from accelfn.engine import engine
from accelfn.state import grads, succession
from accelfn.step import counts, skipping, stages, value_and_grad
from accelfn.transforms import precision, skip
from tests.laws import test_counts, test_loss_scales, test_skipping
from tests.mutants.mutant import Mutant
from tests.unit import test_precision

MUTANTS = [
    Mutant(
        "after an update in which nothing counted fp16 overflows",
        test_precision.test_an_update_of_no_weight_tells_fp16_nothing,
        precision.autocast.grads,
        'torch.where(weight > 0, _power_of_2(weight.float()), slot["unit"])'
        " → _power_of_2(weight.float())",
    ),
    Mutant(
        "L18: an overflow in one rank's rows of the gradients is skipped by that rank alone",
        test_skipping.test_an_overflow_in_rows_of_one_rank_skips_the_update_of_all,
        precision.autocast.grads,
        "if not update.replicated: → if not grads.reduced:",
    ),
    Mutant(
        "L18: a wish to skip is not told to the other ranks",
        test_skipping.test_any_wish_of_any_rank_skips_once,
        skipping._agreed,
        "if not skip.agreed: → if False:",
    ),
    Mutant(
        "L18: a transform that does not wish to skip takes back another's wish",
        test_skipping.test_any_wish_of_any_rank_skips_once,
        grads.Grads.with_skip,
        "wish if before is None else before | wish → wish",
    ),
    Mutant(
        "L18: under local_sgd only the rank whose gradients overflow knows it",
        test_skipping.test_one_bad_element_on_one_rank_skips_that_update_on_all,
        precision.autocast.grads,
        "if not update.replicated: → if False:",
    ),
    Mutant(
        "L18: skip_nonfinite calls unreduced gradients agreed",
        test_skipping.test_one_bad_element_on_one_rank_skips_that_update_on_all,
        skip.skip_nonfinite.grads,
        "agreed=update.replicated → agreed=True",
    ),
    Mutant(
        "L18: what transforms of gradients noted of a skipped update stays",
        test_skipping.test_a_skipped_update_is_one_that_was_not,
        succession.skipped,
        "num_skipped=state.num_skipped + 1,"
        " → num_skipped=state.num_skipped + 1, slots=update.slots,",
    ),
    Mutant(
        "L19: state.step and the schedule go on over a skipped update",
        test_loss_scales.test_the_scale_follows_its_rule,
        succession.skipped,
        "step=state.step, → step=state.step + 1,",
    ),
    Mutant(
        "L18: gradients that are not finite are applied",
        test_skipping.test_one_bad_element_on_one_rank_skips_that_update_on_all,
        stages.take,
        "if update.skipped: → if False:",
    ),
    Mutant(
        "L18: an update is skipped wherever a transform looks",
        test_skipping.test_looking_changes_nothing,
        skipping.decided,
        "bool(flag) → True",
    ),
    Mutant(
        "L18: a skipped update takes back the smaller scale too",
        test_loss_scales.test_the_scale_follows_its_rule,
        succession.through_state,
        "state = changed(state, slots=with_own(slots, owner.name, kept)) → pass",
    ),
    Mutant(
        "L18: growth_factor is ignored",
        test_loss_scales.test_the_scale_follows_its_rule,
        precision.autocast.grads,
        'self._option("growth_factor") → 2.0',
    ),
    Mutant(
        "L16: gradients are not divided by the loss scale before they are clipped",
        test_loss_scales.test_a_scale_that_is_a_power_of_2_changes_no_bit,
        grads.Taken.scale,
        "self.loss_scale.double() * self.denominator → self.denominator",
    ),
    Mutant(
        "L17: only the first micro-batch's loss is scaled",
        test_loss_scales.test_a_scale_that_is_a_power_of_2_changes_no_bit,
        engine.Engine._backward,
        "if loss_scale is not None: → if loss_scale is not None and into is None:",
    ),
    Mutant(
        "L17: the scale of a total is not divided by its weight",
        test_loss_scales.test_a_loss_that_is_a_total_needs_no_smaller_scale,
        precision.autocast.loss_scale,
        'slot["scale"] / slot["unit"] → slot["scale"]',
        args={"rows": 4096},
    ),
    Mutant(
        "L18: imaginary parts are not looked at",
        test_skipping.test_what_is_not_finite_is_found,
        lists._dense,
        "torch.view_as_real(tensor) → torch.view_as_real(tensor)[..., 0]",
    ),
    Mutant(
        "L18: max_consecutive counts all skips, not those in a row",
        test_skipping.test_too_many_in_a_row_raise_on_every_rank,
        skip.skip_nonfinite.after_update,
        '{"consecutive": _none(count.device)} if count else slot → slot',
    ),
    Mutant(
        "L18: a fused optimizer is not given the flag",
        test_skipping.test_a_device_that_skips_by_itself_does_as_the_host,
        engine.Engine.update,
        "self._optimizer.update(hyper, divisor, skip)"
        " → self._optimizer.update(hyper, divisor, None)",
    ),
    Mutant(
        "L18: skips that were counted before are forgotten",
        test_skipping.test_a_device_that_skips_by_itself_does_as_the_host,
        succession._counted,
        "before + flag.long() → flag.long()",
    ),
    Mutant(
        "L3: a loss with several denominators divides by what its rank has",
        test_counts.test_several_denominators_are_those_of_the_whole_update,
        counts.counted,
        "if ranks.size > 1: → if False:",
    ),
    Mutant(
        "L4: a loss with several denominators divides by what its first micro-batch has",
        test_counts.test_several_denominators_are_those_of_the_whole_update,
        value_and_grad._count,
        "parts_of(part)] → parts_of(part)[:1]]",
    ),
    Mutant(
        "L3: a loss that divided by its count is divided by it once more",
        test_counts.test_a_count_of_samples_is_the_mean,
        counts.of_shares,
        "share.total * counts.whole → share.total",
    ),
]
