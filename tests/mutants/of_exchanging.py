# SPDX-License-Identifier: Apache-2.0
"""Bugs that show where a setup changes in mid-run, or an engine is made anew."""

from accelfn.checkpoint import elastic
from accelfn.definition import slots
from accelfn.engine import building
from accelfn.state import state, values
from accelfn.transforms import check, ema, local_sgd
from tests.laws import test_exchanging
from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "L10: ranks are averaged at multiples, whenever local_sgd was put on",
        test_exchanging.test_a_period_begins_where_it_was_put_on,
        local_sgd.local_sgd._begun,
        '"since": state.step → "since": 0',
    ),
    Mutant(
        "L10: an engine made anew asks of ranks that train apart that they agree",
        test_exchanging.test_a_period_begins_where_it_was_put_on,
        building.compare,
        "not is_apart or state.step == 0 → True",
    ),
    Mutant(
        "L45: ranks that go on from a mean count what one of those before had seen",
        test_exchanging.test_a_period_begins_where_it_was_put_on,
        local_sgd.local_sgd.merge,
        '{**slots[0], "weight": 0} → slots[0]',
    ),
    Mutant(
        "L45: ranks that go on from one count what that one had seen, each for itself",
        test_exchanging.test_a_period_begins_where_it_was_put_on,
        elastic._alike,
        "_, slots[each.name] = _merged(state, each, [slot] * count, source)"
        " → slots[each.name] = slot",
    ),
    Mutant(
        "L2: DDP takes over what ranks have trained apart, without a look at their optimizers",
        test_exchanging.test_ranks_go_together_again_when_they_agree,
        values.check_met,
        '"opt_state": values.opt_state, → ',
    ),
    Mutant(
        "L2: DDP takes over what ranks have trained apart, without a look at their averages",
        test_exchanging.test_ranks_go_together_again_when_they_agree,
        values.check_met,
        '"slots": shared_slots(values.slots, own), → ',
    ),
    Mutant(
        "L2: DDP takes what somebody gave to one rank alone, without a look",
        test_exchanging.test_ddp_looks_at_what_it_is_given,
        building.compare,
        "not is_apart or state.step == 0 → state.step == 0",
    ),
    Mutant(
        "L10: finalize averages again what has just been averaged",
        test_exchanging.test_what_is_averaged_stays,
        local_sgd.local_sgd.finalize,
        "if _owes(state, slot): → if True:",
    ),
    Mutant(
        "L2: replicas are compared behind the update after each multiple",
        test_exchanging.test_replicas_are_checked_at_multiples,
        check.check_replicas.after_update,
        "state.step % self.every == 0 → (state.step - 1) % self.every == 0",
    ),
    Mutant(
        "L20: an average that is put on again goes on from the one that was taken off",
        test_exchanging.test_an_average_begins_where_it_was_put_on,
        slots.carried_over,
        "gone = set(old) - set(new) → gone = set()",
    ),
    Mutant(
        "L20: an average begins at 0, not at the parameters",
        test_exchanging.test_an_average_begins_where_it_was_put_on,
        ema.ema.init,
        "param.clone() → torch.zeros_like(param)",
    ),
    Mutant(
        "L19: a state with another setup begins its schedule again",
        test_exchanging.test_what_is_neutral_comes_and_goes,
        state.TrainState.with_setup,
        "**values.by_field, → **values.by_field, step=0,",
    ),
]
