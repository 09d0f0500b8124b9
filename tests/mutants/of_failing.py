# SPDX-License-Identifier: Apache-2.0
"""Bugs that show behind a failure or a skip, and in gradients taken by hand."""

from accelfn import backward, grads, update
from accelfn.engine import engine
from tests.laws import test_failing, test_gradients, test_skipping
from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        name="divided twice",
        says="gradients that a failed update has worked on are taken again as they are",
        law="L54",
        test=test_failing.test_gradients_of_a_failed_update,
        place=update._updated,
        old="except BaseException:\n        given.give_away()\n        raise",
        new="except ZeroDivisionError:\n        given.give_away()\n        raise",
    ),
    Mutant(
        name="skipped gradients stay",
        says="gradients of an update that was skipped are there in the next backward pass",
        law="L54",
        test=test_failing.test_a_failed_call_costs_itself,
        place=engine.Engine.discard,
        old="param.grad = None",
        new="pass",
    ),
    Mutant(
        name="half an end",
        says="a state whose finalize has failed can be used as if it had not begun",
        law="L54",
        test=test_failing.test_a_state_that_was_updated_says_so,
        args={"field": "finalize"},
        place=update.finalize.__wrapped__,
        old="state.lease.end(StateDonatedError, _INTERRUPTED, update=state.num_tried)",
        new="pass",
    ),
    Mutant(
        name="a weight that may be 0",
        says="a weight of 0 that is a number is taken for one that can be divided by",
        law="L3",
        test=test_gradients.test_weights_of_nothing,
        place=engine.Engine.value_and_grad,
        old="and weight >= 1,",
        new="and weight >= 0,",
    ),
    Mutant(
        name="the mean of a rank counts as its total",
        says="sync_grads adds up means, each counting alike",
        law="L3",
        test=test_gradients.test_means_are_reduced_by_weight,
        place=update.sync_grads.__wrapped__,
        old="factor = grads.divisor if grads.is_mean else 1",
        new="factor = 1",
    ),
    Mutant(
        name="the mean weight of ranks",
        says="a gradient's weight is the mean over ranks, where it was averaged",
        law="L3",
        test=test_gradients.test_weights_of_nothing,
        place=grads.Grads.weight,
        old="self.divisor * self.num_averaged",
        new="self.divisor",
    ),
    Mutant(
        name="what was left out is applied",
        says="a gradient that a transform left out is the one that the backward pass left",
        law="L26",
        test=test_gradients.test_what_is_left_out_stays,
        place=engine.Engine.prepare,
        old="grads.tensors.get(name)",
        new="grads.tensors.get(name, param.grad)",
    ),
    Mutant(
        name="the place is forgotten",
        says="a plain value that is added to a batch's gradients forgets its cursor",
        law="L42",
        test=test_gradients.test_what_is_added_keeps_the_place,
        place=backward._innermost,
        old="cursor = None if into is None else into.cursor",
        new="cursor = None",
    ),
    Mutant(
        name="bound by its parameters",
        says="a state with the last one's parameters is taken for it, whatever else it holds",
        law="L22",
        test=test_gradients.test_a_state_is_what_it_holds,
        place=engine.Engine.bind,
        old="bound[0] is params and bound[1] is buffers and bound[2] is opt_state",
        new="bound[0] is params",
    ),
    Mutant(
        name="the last micro-batch's loss",
        says="a rank whose first micro-batch had no finite loss is said to have had one",
        law="L18",
        test=test_skipping.test_too_many_in_a_row_raise_on_every_rank,
        place=engine.Engine.value_and_grad,
        old="read.is_finite and (into is None or into.finite_loss)",
        new="read.is_finite",
    ),
]
