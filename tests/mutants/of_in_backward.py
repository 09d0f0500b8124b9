# SPDX-License-Identifier: Apache-2.0
"""Bugs in updates that a backward pass takes."""

from accelfn.engine import ddp
from accelfn.engine.optimizer import in_backward, live_optimizer
from accelfn.step import value_and_grad
from accelfn.transforms import in_backward as transform
from tests.laws import test_in_backward
from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "L3: a gradient is not divided by the weight before its parameter is stepped",
        test_in_backward.test_it_is_the_plain_update,
        in_backward.LiveUpdate._take,
        "divide_([grad], divisor) → pass",
    ),
    Mutant(
        "L24: each parameter finds the numbers that the one before has left in the group",
        test_in_backward.test_it_is_the_plain_update,
        live_optimizer.LiveOptimizer.step_alone,
        "group.update(found) → pass",
    ),
    Mutant(
        "L24: a group without parameters, which may count updates, is not stepped",
        test_in_backward.test_it_is_the_plain_update,
        live_optimizer.LiveOptimizer.begin,
        "set(range(len(self._found))) → {i for i, _ in self._places.values()}",
    ),
    Mutant(
        "L2: a parameter is stepped by its own rank's gradient",
        test_in_backward.test_over_ranks_it_is_the_plain_update,
        ddp.DDPRunner._average,
        "bucket.mul_(1.0 / self._ranks.size) → bucket.mul_(1.0)",
    ),
    Mutant(
        "L22: a gradient is there until the backward pass is over",
        test_in_backward.test_gradients_are_never_all_there,
        in_backward.LiveUpdate._take,
        "param.grad = None → pass",
    ),
    Mutant(
        "L54: a state that a broken backward pass has partly updated can be used",
        test_in_backward.test_a_broken_backward_pass_ends_the_state,
        in_backward.LiveUpdate._take,
        """\
begin()
→
pass
""",
    ),
    Mutant(
        "L42: what the optimizer keeps is not what the plain update leaves",
        test_in_backward.test_saved_in_one_setup_it_goes_on_in_the_other,
        live_optimizer.LiveOptimizer.end,
        "return self.finish() → return self._state",
    ),
    Mutant(
        "L22: an optimizer is not tried",
        test_in_backward.test_an_optimizer_that_couples_parameters_is_refused,
        transform.optimizer_in_backward.init,
        "if differ: → if False:",
    ),
    Mutant(
        "L22: value_and_grad gives what has been freed",
        test_in_backward.test_gradients_by_themselves_are_refused,
        value_and_grad._check_planned,
        "if live.is_planned and into is None and sync: → if True:",
    ),
]
