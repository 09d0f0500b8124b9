# SPDX-License-Identifier: Apache-2.0
"""Bugs in the loop that accelfn writes itself."""

from accelfn.loop import run
from tests.laws import test_running as laws
from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "L42: a run goes on for an update after its last",
        laws.test_it_is_the_loop,
        run._end,
        "state.step >= until → state.step > until",
    ),
    Mutant(
        "L34: what was logged is not forgotten, and is logged again",
        laws.test_it_is_the_loop,
        run._Actions.take,
        "= self._since[period], Metrics({})"
        " → = self._since[period], self._since[period]",
    ),
    Mutant(
        "L42: a run does not look whether its store has a checkpoint",
        laws.test_a_run_that_is_cut_goes_on,
        run.run,
        "state = store.restore(state) → pass",
    ),
    Mutant(
        "L54: the rank that got the signal does not ask the others",
        laws.test_ranks_end_together,
        run.run,
        "stop.requested() → stop.received",
    ),
]
