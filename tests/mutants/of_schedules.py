# SPDX-License-Identifier: Apache-2.0
"""Bugs in what a schedule, a torch scheduler or a transform sets in parameter groups."""

from accelfn import hyper, optimizer, update
from accelfn.schedules import of_torch
from tests.laws import test_torch_schedules
from tests.mutants.mutant import Mutant

STEPPED = test_torch_schedules.test_from_torch_is_the_scheduler_stepped
CYCLED = test_torch_schedules.test_momenta_are_cycled

MUTANTS = [
    Mutant(
        name="a scheduler on rates of 1",
        says="what a torch scheduler says absolutely is wrong by the optimizer's rate",
        law="L19",
        test=STEPPED,
        place=of_torch.TorchRates._note,
        old='float(group["lr"])',
        new='float(group["lr"]) / float(group.get("initial_lr", 1)) * self._given[0]["lr"]',
    ),
    Mutant(
        name="the first group's rate for all",
        says="rates by group, max_lr=[a, b] say, are those of the first",
        law="L19",
        test=STEPPED,
        place=of_torch.TorchRates._note,
        old='float(group["lr"])',
        new='float(self._optimizer.param_groups[0]["lr"])',
    ),
    Mutant(
        name="cycled momenta are dropped",
        says="a torch scheduler sets learning rates and nothing else",
        law="L19",
        test=CYCLED,
        place=of_torch.TorchRates.__call__,
        old="self._others.items()",
        new="()",
    ),
    Mutant(
        name="momenta an update late",
        says="a momentum that a scheduler begins to move is taken for the next update",
        law="L19",
        test=CYCLED,
        place=of_torch.TorchRates._note,
        old="[given] * self._num_known",
        new="[given] * (self._num_known + 1)",
    ),
    Mutant(
        name="rates in another dtype",
        says="a scheduler of a rate that is a tensor rounds otherwise than on that",
        law="L19",
        test=STEPPED,
        place=optimizer.scratch_of,
        old="group[key].detach().cpu()",
        new="group[key].detach().cpu().double()",
    ),
    Mutant(
        name="the schedule has the last word",
        says="what a transform's hyper sets is lost where a schedule is",
        law="L19",
        test=test_torch_schedules.test_hyper_has_the_last_word,
        place=hyper.assigned,
        old="planned[i, key] = value",
        new="planned.setdefault((i, key), value)",
    ),
    Mutant(
        name="rates in the order of asking",
        says="a torch scheduler goes on from where it was, whatever update is asked for",
        law="L19",
        test=test_torch_schedules.test_any_update_can_be_asked_for,
        place=of_torch.TorchRates.__call__,
        old='(i, "lr"): known[update]',
        new='(i, "lr"): known[-1]',
    ),
    Mutant(
        name="a resume starts the scheduler again",
        says="a state that was loaded takes the rates of a run's first updates",
        law="L46",
        test=test_torch_schedules.test_from_torch_over_ranks_and_cuts,
        place=hyper.scheduled,
        old="rates(state.step)",
        new="rates(state.step - state.definition.cache.setdefault('first', state.step))",
    ),
    Mutant(
        name="one scheduler for all states",
        says="what was found on one optimizer's groups is taken for another's",
        law="L19",
        test=test_torch_schedules.test_states_that_share_one_do_not_meet,
        place=of_torch.from_torch.on,
        old="return TorchRates(self.factory, optimizer)",
        new="return vars(self.factory).setdefault("
        "'rates', TorchRates(self.factory, optimizer))",
    ),
    Mutant(
        name="no schedule in the backward pass",
        says="an optimizer that steps in the backward pass takes its own rates",
        law="L19",
        test=test_torch_schedules.test_from_torch_in_backward,
        place=update.step_in_backward,
        old="scheduled(state)",
        new="{}",
    ),
    Mutant(
        name="what follows a metric is stepped without",
        says="a scheduler that wants a metric is taken, and never moves",
        law="L19",
        test=test_torch_schedules.test_what_follows_a_metric_is_refused,
        args={"name": "greedy"},
        place=of_torch._check,
        old="if needed:",
        new="if False:",
    ),
]
