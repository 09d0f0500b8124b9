# SPDX-License-Identifier: Apache-2.0
"""Bugs in how a user's own `reduce` is taken, and in what a plain loop does otherwise."""

from accelfn.collectives import replicas, shares, trees
from accelfn.state import grads, hyper, update
from accelfn.step import stages
from accelfn.testing.simulation import sayings
from tests.laws import (
    test_coupled_losses,
    test_gradients,
    test_owed,
    test_random_setups,
    test_reducing,
    test_torch_schedules,
)
from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "L1: rows of a stand-in are gathered in a loss",
        test_coupled_losses.test_coupled_losses_train_as_on_one_process,
        trees._gathered,
        "held is not None and not held[world.rank] → False",
    ),
    Mutant(
        "L1: ranks count alike in a loss's mean, however few samples they have",
        test_coupled_losses.test_coupled_losses_train_as_on_one_process,
        shares.uneven_counts,
        "return held if any(held) else None → return [1] * len(held)",
    ),
    Mutant(
        "L3: gradients that somebody has read are divided again",
        test_gradients.test_gradients_are_those_of_the_mean,
        grads.Grads.divided,
        "lease.is_mean = True → pass",
    ),
    Mutant(
        "L2: the sums of all ranks are divided by the weight of one",
        test_reducing.test_a_users_sum_is_that_of_all_ranks,
        grads.Grads.with_sums,
        "divisor=_whole_weight(weight), → divisor=self.taken.divisor,",
    ),
    Mutant(
        "L3: a world of one rank never calls a user's reduce",
        test_reducing.test_a_reduce_is_called_on_any_number_of_ranks,
        stages.reduced,
        "definition.copy.size == 1 and not definition.setup.reduces"
        " → definition.copy.size == 1",
    ),
    Mutant(
        "L2: ranks may divide by weights that differ in a bit",
        test_reducing.test_sums_that_differ_by_rank_are_refused,
        replicas.check_sums,
        'rows = {"the weight": f"{float(weight)!r}"} → rows = {}',
    ),
    Mutant(
        "L2: what the third rank says is not compared with what the first did",
        test_reducing.test_sums_that_differ_by_rank_are_refused,
        sayings.Sayings.say,
        "if self._num_said[place] == self._size: → if self._num_said[place] == 2:",
    ),
    Mutant(
        "L2: gradients of each rank's own weight are applied",
        test_reducing.test_a_weight_of_one_rank_is_refused,
        stages._check_sums,
        """\
if not sums.reduced:
→
if not sums.reduced:
        return
    if False:
""",
    ),
    Mutant(
        "L50: what a user's reduce draws is another number on each rank",
        test_reducing.test_draws_in_a_reduce_are_shared,
        update.through,
        "with shared_draws(state, field), torch.no_grad(): → with torch.no_grad():",
    ),
    Mutant(
        "L3: gradients are divided by a weight that is one too many",
        test_random_setups.test_it_trains_what_a_plain_loop_trains,
        grads.Taken.scale,
        "return self.denominator → return self.denominator + 1",
    ),
    Mutant(
        "L19: an update takes the rate of how many were tried, not of how many were taken",
        test_torch_schedules.test_from_torch_is_the_scheduler_stepped,
        hyper._planned,
        "rates(state.step) → rates(state.num_tried)",
    ),
    Mutant(
        "L2: what a user reduced is divided by one sample too many",
        test_reducing.test_a_users_sum_in_16_bits,
        grads.Grads.with_sums,
        "divisor=_whole_weight(weight), → divisor=_whole_weight(weight) + 1,",
    ),
    Mutant(
        "L8: every rank warns of models that differ as its world is closed",
        test_owed.test_ranks_that_end_with_other_models_are_told,
        stages._warn_of_owed,
        " and state.world.is_main: → :",
    ),
]
