# SPDX-License-Identifier: Apache-2.0
"""Bugs that show behind a failure or a skip, and in gradients taken by hand."""

from accelfn.engine import engine, home
from accelfn.state import grads
from accelfn.step import apply_grads, counts, stages, sync_grads, value_and_grad
from tests.laws import test_counts, test_failing, test_gradients, test_skipping
from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "L54: gradients that a failed update has worked on are taken again as they are",
        test_failing.test_gradients_of_a_failed_update,
        stages.take,
        """\
    finally:
            given.give_away()
→
    finally:
            pass
""",
    ),
    Mutant(
        "L54: gradients of an update that was skipped are there in the next backward pass",
        test_failing.test_a_failed_call_costs_itself,
        engine.Engine.discard,
        "self._home.clear_gradients() → pass",
    ),
    Mutant(
        "L54: a state whose finalize has failed can be used as if it had not begun",
        test_failing.test_a_state_that_was_updated_says_so,
        apply_grads.finalize.__wrapped__,
        "begin_donation(state, state.num_tried) → pass",
        args={"field": "finalize"},
    ),
    Mutant(
        "L3: a weight of 0 that is a number is taken for one that can be divided by",
        test_gradients.test_weights_of_nothing,
        engine.Engine.value_and_grad,
        "and weight >= 1, → and weight >= 0,",
    ),
    Mutant(
        "L3: sync_grads adds up means, each counting alike",
        test_gradients.test_means_are_reduced_by_weight,
        sync_grads.sync_grads.__wrapped__,
        "factor = taken.scale if taken.lease.is_mean else 1 → factor = 1",
    ),
    Mutant(
        "L3: a gradient's weight is the mean over ranks, where it was averaged",
        test_gradients.test_weights_of_nothing,
        grads.Grads.weight,
        "taken.divisor * taken.num_averaged → taken.divisor",
    ),
    Mutant(
        "L7: the sample that stands in for an empty share is in the running statistics",
        test_gradients.test_a_stand_in_is_in_no_buffer,
        engine.Engine._of_others,
        "names = self._of_all_ranks → names = written.keys()",
    ),
    Mutant(
        "L26: a gradient that a transform left out is the one that the backward pass left",
        test_gradients.test_what_is_left_out_stays,
        home.ReplicaHome.put_gradients,
        "grads.as_taken.get(name) → grads.tensors.get(name, param.grad)",
    ),
    Mutant(
        "L42: a plain value that is added to a batch's gradients forgets its cursor",
        test_gradients.test_what_is_added_keeps_the_place,
        value_and_grad._innermost,
        "cursor = None if into is None else into.taken.cursor → cursor = None",
    ),
    Mutant(
        "L22: a state with the last one's parameters is taken for it, whatever else it holds",
        test_gradients.test_a_state_is_what_it_holds,
        engine.Engine.bind,
        "bound[0] is params and bound[1] is buffers and bound[2] is opt_state"
        " → bound[0] is params",
    ),
    Mutant(
        "L18: a rank whose first micro-batch had no finite loss is said to have had one",
        test_skipping.test_too_many_in_a_row_raise_on_every_rank,
        engine.Engine.value_and_grad,
        "read.is_finite and (before is None or before.finite_loss) → read.is_finite",
    ),
    Mutant(
        "L3: a batch that comes too early is added to gradients, and what is between is lost",
        test_gradients.test_batches_that_are_added_follow_one_another,
        value_and_grad._cursor_after,
        "start == before or → before is not None or",
    ),
    Mutant(
        "L3: a batch that is added again moves the data back, so that others come twice",
        test_gradients.test_batches_that_are_added_follow_one_another,
        value_and_grad._cursor_after,
        "return max(before, after, key=lambda each: (each.epoch, each.samples))"
        " → return after",
    ),
    Mutant(
        "L3: what a rank reads for itself is not counted",
        test_counts.test_what_each_rank_reads_for_itself_is_counted,
        counts._of_part,
        "part.weights[0] == 0 → not part.weights[0]",
    ),
]
