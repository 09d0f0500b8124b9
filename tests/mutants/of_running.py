# SPDX-License-Identifier: Apache-2.0
"""Bugs in the loop that accelfn writes itself."""

from accelfn.loop import run
from tests.laws import test_running as laws
from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        name="an update too many",
        says="a run goes on for an update after its last",
        law="L42",
        test=laws.test_it_is_the_loop,
        place=run._end,
        old="state.step >= until",
        new="state.step > until",
    ),
    Mutant(
        name="metrics are seen twice",
        says="what was logged is not forgotten, and is logged again",
        law="L34",
        test=laws.test_it_is_the_loop,
        place=run._Actions.take,
        old="= self._since[period], Metrics({})",
        new="= self._since[period], self._since[period]",
    ),
    Mutant(
        name="a run begins anew",
        says="a run does not look whether its store has a checkpoint",
        law="L42",
        test=laws.test_a_run_that_is_cut_goes_on,
        place=run.run,
        old="state = store.restore(state)",
        new="pass",
    ),
    Mutant(
        name="a rank ends alone",
        says="the rank that got the signal does not ask the others",
        law="L54",
        test=laws.test_ranks_end_together,
        place=run.run,
        old="stop.requested()",
        new="stop.received",
    ),
]
