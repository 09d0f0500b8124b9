# SPDX-License-Identifier: Apache-2.0
"""Bugs in what a schedule, a torch scheduler or a transform sets in parameter groups."""

import inspect

from accelfn.checkpoint import fields
from accelfn.engine import building
from accelfn.loop import observe
from accelfn.schedules import advice, of_torch
from accelfn.state import hyper
from accelfn.step import stages
from accelfn.structure import prototype
from accelfn.transforms import plateau
from tests.laws import test_plateau, test_schedule_advice, test_torch_schedules
from tests.mutants.mutant import Mutant

STEPPED = test_torch_schedules.test_from_torch_is_the_scheduler_stepped
BROKEN = test_torch_schedules.test_an_error_is_told_again_or_costs_nothing
CYCLED = test_torch_schedules.test_momenta_are_cycled

MUTANTS = [
    Mutant(
        "L19: what a torch scheduler says absolutely is wrong by the optimizer's rate",
        STEPPED,
        of_torch.TorchRates._note,
        'float(group["lr"])'
        ' → float(group["lr"]) / float(group.get("initial_lr", 1)) * self._given[0]["lr"]',
    ),
    Mutant(
        "L19: rates by group, max_lr=[a, b] say, are those of the first",
        STEPPED,
        of_torch.TorchRates._note,
        'float(group["lr"]) → float(self._optimizer.param_groups[0]["lr"])',
    ),
    Mutant(
        "L19: a torch scheduler sets learning rates and nothing else",
        CYCLED,
        of_torch.TorchRates.__call__,
        "self._others.items() → ()",
    ),
    Mutant(
        "L19: a momentum that a scheduler begins to move is taken for the next update",
        CYCLED,
        of_torch.TorchRates._note,
        "[given] * self._num_known → [given] * (self._num_known + 1)",
    ),
    Mutant(
        "L19: a scheduler of a rate that is a tensor rounds otherwise than on that",
        STEPPED,
        prototype.scratch_of,
        "group[key].detach().cpu() → group[key].detach().cpu().double()",
    ),
    Mutant(
        "L19: what a transform's hyper sets is lost where a schedule is",
        test_torch_schedules.test_hyper_has_the_last_word,
        hyper.laid_over,
        "planned[i, key] = value → planned.setdefault((i, key), value)",
    ),
    Mutant(
        "L19: a torch scheduler goes on from where it was, whatever update is asked for",
        test_torch_schedules.test_any_update_can_be_asked_for,
        of_torch.TorchRates.__call__,
        '(i, "lr"): known[update] → (i, "lr"): known[-1]',
    ),
    Mutant(
        "L19: a torch scheduler that was interrupted goes on from half of its work",
        BROKEN,
        of_torch.TorchRates._advance,
        "self._is_whole = False → pass",
    ),
    Mutant(
        "L19: a torch scheduler that was interrupted begins with its first update again",
        BROKEN,
        of_torch.TorchRates._make_again,
        "self._num_known - 1 → 0",
    ),
    Mutant(
        "L19: a torch scheduler that failed is told so once, and then goes on",
        BROKEN,
        of_torch.TorchRates._advance,
        "if self._ended is None: → if True:",
    ),
    Mutant(
        "L46: a state that was loaded takes the rates of a run's first updates",
        test_torch_schedules.test_from_torch_over_ranks_and_cuts,
        hyper._planned,
        "rates(state.step)"
        " → rates(state.step - state.definition.cache.keys.setdefault('first', state.step))",
    ),
    Mutant(
        "L19: what was found on one optimizer's groups is taken for another's",
        test_torch_schedules.test_states_that_share_one_do_not_meet,
        of_torch.from_torch.on,
        "return TorchRates(self.factory, optimizer)"
        " → return vars(self.factory).setdefault('rates', TorchRates(self.factory, optimizer))",
    ),
    Mutant(
        "L19: an optimizer that steps in the backward pass takes its own rates",
        test_torch_schedules.test_from_torch_in_backward,
        stages.take_in_backward,
        "live.plan(planned, → live.plan({},",
    ),
    Mutant(
        "L19: a scheduler that wants a metric is taken, and never moves",
        test_torch_schedules.test_what_follows_a_metric_is_refused,
        of_torch._check,
        "if needed: → if False:",
        args={"name": "greedy"},
    ),
    Mutant(
        "L19: one value more than `patience` is let pass",
        test_plateau.test_plateau_is_torchs,
        plateau.plateau.observe,
        "num_bad > self.patience → num_bad > self.patience + 1",
    ),
    Mutant(
        "L19: values after a reduction count as bad at once",
        test_plateau.test_plateau_is_torchs,
        plateau.plateau.observe,
        "if cooling > 0: → if False:",
    ),
    Mutant(
        "L19: min_lr of the first group bounds the rates of all",
        test_plateau.test_plateau_is_torchs,
        plateau.plateau.hyper,
        "least[i] → least[0]",
    ),
    Mutant(
        "L19: a rate that is a tensor is reduced as if it were not",
        test_plateau.test_plateau_is_torchs,
        plateau.plateau._reduced,
        "isinstance(rate, torch.Tensor) → False",
    ),
    Mutant(
        "L19: once a plateau has reduced, the schedule is lost",
        test_plateau.test_plateau_reduces_what_is_scheduled,
        plateau.plateau.hyper,
        'hyper.get((i, "lr"), group["lr"]) → group["lr"]',
    ),
    Mutant(
        "L46: a state that was loaded has observed nothing",
        test_plateau.test_what_was_observed_is_saved,
        fields.with_fields,
        'slots=slots, → slots={**slots, "plateau": state.slots["plateau"]},',
    ),
    Mutant(
        "L2: a value of one rank's own moves its rate, and replicas drift",
        test_plateau.test_ranks_observe_the_same,
        inspect.unwrap(observe.observe),
        'repr(number) → ""',
    ),
    Mutant(
        "L2: values are compared where nothing else crosses the ranks",
        test_plateau.test_ranks_apart_observe_their_own,
        inspect.unwrap(observe.observe),
        'if setup.owners["engine"] or setup.owners["reduce"]: → if True:',
    ),
    Mutant(
        "L19: a schedule of absolute learning rates trains next to nothing, untold",
        test_schedule_advice.test_rates_for_factors_are_told,
        advice.advise_of_rates,
        "0 < peak < _LEAST_PEAK → 0 < peak < _LEAST_PEAK / 10",
    ),
    Mutant(
        "L19: a schedule that begins low is warned of, however high it rises",
        test_schedule_advice.test_factors_are_never_told,
        advice._factors,
        "(*range(100), *sorted(far)) → range(10)",
    ),
    Mutant(
        "L19: a torch scheduler whose rates are small, as rates are, is warned of",
        test_schedule_advice.test_schedulers_of_torch_are_not_told,
        advice.advise_of_end,
        "_SHORT, update // 10 → 1, update // 10",
    ),
    Mutant(
        "L19: each update at a rate of 0 is warned of",
        test_schedule_advice.test_a_schedule_that_ends_before_the_run,
        advice.advise_of_end,
        "return math.inf → return update + 1",
    ),
    Mutant(
        "L19: a schedule's end is warned of where a transform sets the rates",
        test_schedule_advice.test_rates_of_a_transform_are_its_own,
        hyper._planned,
        '"lr" not in named → named is not None',
    ),
    Mutant(
        "L2: what all ranks would say is said by each",
        test_schedule_advice.test_one_rank_tells,
        building.engine_of,
        "if world.is_main and → if",
    ),
]
