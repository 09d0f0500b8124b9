# SPDX-License-Identifier: Apache-2.0
"""Bugs in how a user's own `reduce` is taken, and in what a plain loop does otherwise."""

from accelfn.collectives import replicas
from accelfn.state import grads, hyper, update
from accelfn.step import stages
from accelfn.testing.simulation import sayings
from tests.laws import test_random_setups, test_reducing, test_torch_schedules
from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        name="sums by this rank's weight",
        says="the sums of all ranks are divided by the weight of one",
        law="L2",
        test=test_reducing.test_a_users_sum_is_that_of_all_ranks,
        place=grads.Grads.with_sums,
        old="divisor=_whole_weight(weight),",
        new="divisor=self.taken.divisor,",
    ),
    Mutant(
        name="means are taken for sums",
        says="what a user reduced is not divided any more",
        law="L3",
        test=test_reducing.test_a_users_sum_in_16_bits,
        place=grads.Grads.with_sums,
        old="is_mean=False,",
        new="is_mean=True,",
    ),
    Mutant(
        name="the weight is not compared",
        says="ranks may divide by weights that differ in a bit",
        law="L2",
        test=test_reducing.test_sums_that_differ_by_rank_are_refused,
        place=replicas.check_sums,
        old='rows = {"the weight": f"{float(weight)!r}"}',
        new="rows = {}",
    ),
    Mutant(
        name="two ranks are enough",
        says="what the third rank says is not compared with what the first did",
        law="L2",
        test=test_reducing.test_sums_that_differ_by_rank_are_refused,
        place=sayings.Sayings.say,
        old="if self._num_said[place] == self._size:",
        new="if self._num_said[place] == 2:",
    ),
    Mutant(
        name="any reduce will do",
        says="gradients of each rank's own weight are applied",
        law="L2",
        test=test_reducing.test_a_weight_of_one_rank_is_refused,
        place=stages._check_sums,
        old="if not sums.reduced:",
        new="if not sums.reduced:\n        return\n    if False:",
    ),
    Mutant(
        name="a reduce draws for itself",
        says="what a user's reduce draws is another number on each rank",
        law="L50",
        test=test_reducing.test_draws_in_a_reduce_are_shared,
        place=update.through,
        old="with shared_draws(state, field), torch.no_grad():",
        new="with torch.no_grad():",
    ),
    Mutant(
        name="one sample more",
        says="gradients are divided by a weight that is one too many",
        law="L3",
        test=test_random_setups.test_it_trains_what_a_plain_loop_trains,
        place=grads.Taken.scale,
        old="return self.denominator",
        new="return self.denominator + 1",
    ),
    Mutant(
        name="skipped updates move the rate",
        says="an update takes the rate of how many were tried, not of how many were taken",
        law="L19",
        test=test_torch_schedules.test_from_torch_is_the_scheduler_stepped,
        place=hyper._planned,
        old="rates(state.step)",
        new="rates(state.num_tried)",
    ),
]
