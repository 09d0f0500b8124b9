# SPDX-License-Identifier: Apache-2.0
"""Bugs that show where a setup changes in mid-run, or an engine is made anew."""

from accelfn.checkpoint import elastic
from accelfn.definition import slots
from accelfn.engine import engine
from accelfn.state import state
from accelfn.transforms import check, ema, local_sgd
from tests.laws import test_exchanging
from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        name="a period from update 0",
        says="ranks are averaged at multiples, whenever local_sgd was put on",
        law="L10",
        test=test_exchanging.test_a_period_begins_where_it_was_put_on,
        place=local_sgd.local_sgd.init,
        old='"since": state.step',
        new='"since": 0',
    ),
    Mutant(
        name="engines between averages are refused",
        says="an engine made anew asks of ranks that train apart that they agree",
        law="L10",
        test=test_exchanging.test_a_period_begins_where_it_was_put_on,
        place=engine.engine_of,
        old='"apart" not in setup.facts or state.step == 0',
        new="True",
    ),
    Mutant(
        name="the weight of before the cut",
        says="ranks that go on from a mean count what one of those before had seen",
        law="L45",
        test=test_exchanging.test_a_period_begins_where_it_was_put_on,
        place=local_sgd.local_sgd.merge,
        old='{**slots[0], "weight": 0}',
        new="slots[0]",
    ),
    Mutant(
        name="what one has seen all have",
        says="ranks that go on from one count what that one had seen, each for itself",
        law="L45",
        test=test_exchanging.test_a_period_begins_where_it_was_put_on,
        place=elastic._alike,
        old="_, slots[each.name] = _merged(each, [slot] * count, source)",
        new="slots[each.name] = slot",
    ),
    Mutant(
        name="ranks that differ go together",
        says="DDP takes over what ranks have trained apart, without a look",
        law="L2",
        test=test_exchanging.test_ranks_go_together_again_when_they_agree,
        place=engine.engine_of,
        old='"apart" not in setup.facts or state.step == 0',
        new="state.step == 0",
    ),
    Mutant(
        name="an average of what is averaged",
        says="finalize averages again what has just been averaged",
        law="L10",
        test=test_exchanging.test_what_is_averaged_stays,
        place=local_sgd.local_sgd.finalize,
        old='if state.step > slot["since"]:',
        new="if True:",
    ),
    Mutant(
        name="checks an update late",
        says="replicas are compared behind the update after each multiple",
        law="L2",
        test=test_exchanging.test_replicas_are_checked_at_multiples,
        place=check.check_replicas.after_update,
        old="state.step % self.every == 0",
        new="(state.step - 1) % self.every == 0",
    ),
    Mutant(
        name="an average of before",
        says="an average that is put on again goes on from the one that was taken off",
        law="L20",
        test=test_exchanging.test_an_average_begins_where_it_was_put_on,
        place=slots.carried_over,
        old="gone = set(old) - set(new)",
        new="gone = set()",
    ),
    Mutant(
        name="an average from nothing",
        says="an average begins at 0, not at the parameters",
        law="L20",
        test=test_exchanging.test_an_average_begins_where_it_was_put_on,
        place=ema.ema.init,
        old="param.clone()",
        new="torch.zeros_like(param)",
    ),
    Mutant(
        name="another setup, another number of updates",
        says="a state with another setup begins its schedule again",
        law="L19",
        test=test_exchanging.test_what_is_neutral_comes_and_goes,
        place=state.TrainState.with_setup,
        old="slots=slots,",
        new="slots=slots, step=0,",
    ),
]
