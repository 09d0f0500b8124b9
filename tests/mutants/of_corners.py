# SPDX-License-Identifier: Apache-2.0
"""Bugs in corners: of two things that seldom meet, or of a name that says more than its end."""

from accelfn.engine import read_loss
from accelfn.engine.module import first_look
from accelfn.launching import environment
from accelfn.outer import stepping
from accelfn.placing import units
from accelfn.state import beginning, metrics
from accelfn.step import sync_grads
from accelfn.transforms import precision
from tests.mutants.mutant import Mutant
from tests.unit import (
    test_answers,
    test_buffers,
    test_context_parallel,
    test_diloco,
    test_loss,
    test_placing,
    test_precision,
    test_step,
    test_transforms_over_ranks,
)

MUTANTS = [
    Mutant(
        "how often an outer optimizer has stepped is laid over the ranks of a split model",
        test_diloco.test_what_an_outer_optimizer_counts_lies_whole_beside_parts,
        stepping.Outer._laid,
        " or each.shape != local(anchor).shape: → :",
    ),
    Mutant(
        "modules with empty tensors are one unit",
        test_placing.test_what_has_no_elements_shares_no_memory,
        units._key,
        "if tensor.is_meta or not tensor.numel(): → if tensor.is_meta:",
    ),
    Mutant(
        "within a region of the caller's the first update's casts are all updates'",
        test_precision.test_a_region_of_the_callers_changes_nothing,
        precision.autocast.loss,
        """\
        torch.clear_autocast_cache()
        if self.precision == "fp8":  # that of an evaluation was not built
            to_float8(model, self.layers, repr(self))
        try:
            with _casting(kind, dtype):
                return loss_fn(model, batch, *extras)
        finally:
            torch.clear_autocast_cache()
→
        with _casting(kind, dtype):
            return loss_fn(model, batch, *extras)
""",
        args={"precision": "bf16"},
    ),
    Mutant(
        "a parameter that another rank used is stepped there alone",
        test_transforms_over_ranks.test_what_some_ranks_used_all_update_by_hand,
        sync_grads.sync_grads,
        "for name, some in took_part if some} → for name, _ in took_part"
        " if name in grads.tensors}",
    ),
    Mutant(
        "a loss that is a view of a parameter is told as it is after the update",
        test_step.test_a_loss_that_is_a_view_of_a_parameter_is_what_it_was,
        read_loss._checked,
        "if scalar.is_leaf or scalar._is_view() else value → if scalar.is_leaf else value",
    ),
    Mutant(
        "metrics go on with the tensors that they were made of",
        test_loss.test_metrics_are_not_what_a_program_goes_on_counting_with,
        metrics._pair,
        "WeightedSum(own(amount), own(weight)) → WeightedSum(amount, weight)",
    ),
    Mutant(
        "a secret is told whose variable's name does not end in what it is",
        test_answers.test_env_tells_no_secret,
        environment._variables,
        "any(each in name for each in _SECRET) → name.endswith(_SECRET)",
    ),
    Mutant(
        "a buffer that is a constant of a class is the state's own",
        test_buffers.test_a_constant_of_a_class_stays_what_it_is,
        beginning._copies,
        "each.detach().clone() → each.detach()",
    ),
    Mutant(
        "after a first look parts that are not in training are",
        test_context_parallel.test_looking_leaves_no_trace,
        first_look.untouched.__wrapped__,
        """\
        for module, was in zip(modules, training, strict=True):
            module.training = was
→
        model.train(training[0])
""",
    ),
]
