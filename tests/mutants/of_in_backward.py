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
        name="totals are applied",
        says="a gradient is not divided by the weight before its parameter is stepped",
        law="L3",
        test=test_in_backward.test_it_is_the_plain_update,
        place=in_backward.LiveUpdate._take,
        old="divide_([grad], divisor)",
        new="pass",
    ),
    Mutant(
        name="a group counts its parameters",
        says="each parameter finds the numbers that the one before has left in the group",
        law="L24",
        test=test_in_backward.test_it_is_the_plain_update,
        place=live_optimizer.LiveOptimizer.step_alone,
        old="group.update(found)",
        new="pass",
    ),
    Mutant(
        name="empty groups do not count",
        says="a group without parameters, which may count updates, is not stepped",
        law="L24",
        test=test_in_backward.test_it_is_the_plain_update,
        place=live_optimizer.LiveOptimizer.begin,
        old="set(range(len(self._found)))",
        new="{i for i, _ in self._places.values()}",
    ),
    Mutant(
        name="replicas drift",
        says="a parameter is stepped by its own rank's gradient",
        law="L2",
        test=test_in_backward.test_over_ranks_it_is_the_plain_update,
        place=ddp.DDPRunner._average,
        old="bucket.mul_(1.0 / self._world.size)",
        new="bucket.mul_(1.0)",
    ),
    Mutant(
        name="gradients are kept",
        says="a gradient is there until the backward pass is over",
        law="L22",
        test=test_in_backward.test_gradients_are_never_all_there,
        place=in_backward.LiveUpdate._take,
        old="param.grad = None",
        new="pass",
    ),
    Mutant(
        name="half an update passes for none",
        says="a state that a broken backward pass has partly updated can be used",
        law="L54",
        test=test_in_backward.test_a_broken_backward_pass_ends_the_state,
        place=in_backward.LiveUpdate._take,
        old="begin()\n",
        new="pass\n",
    ),
    Mutant(
        name="the optimizer's state is lost",
        says="what the optimizer keeps is not what the plain update leaves",
        law="L42",
        test=test_in_backward.test_saved_in_one_setup_it_goes_on_in_the_other,
        place=live_optimizer.LiveOptimizer.end,
        old="return self.finish()",
        new="return self._state",
    ),
    Mutant(
        name="coupled parameters pass",
        says="an optimizer is not tried",
        law="L22",
        test=test_in_backward.test_an_optimizer_that_couples_parameters_is_refused,
        place=transform.optimizer_in_backward.init,
        old="if differ:",
        new="if False:",
    ),
    Mutant(
        name="no gradients are returned as some",
        says="value_and_grad gives what has been freed",
        law="L22",
        test=test_in_backward.test_gradients_by_themselves_are_refused,
        place=value_and_grad._check_planned,
        old="if live.is_planned and into is None and sync:",
        new="if True:",
    ),
]
