# SPDX-License-Identifier: Apache-2.0
"""Bugs in telling whether an update that raised had changed anything."""

from accelfn.engine import watch
from accelfn.engine.optimizer import live_optimizer
from accelfn.step import stages
from tests.laws import test_interrupted
from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        name="the state is lost",
        says="an optimizer that raised before it changed anything costs the state",
        law="L54",
        test=test_interrupted.test_a_step_that_raises_leaves_a_state_or_none,
        place=stages._undo,
        old="state.lease.restore()",
        new="pass",
    ),
    Mutant(
        name="half an update is none",
        says="nobody looks what an optimizer had changed when it raised",
        law="L54",
        test=test_interrupted.test_a_step_that_raises_leaves_a_state_or_none,
        place=watch.Watch.is_untouched,
        old="self._count != sum(map(_version, self._tensors))",
        new="False",
    ),
    Mutant(
        name="any optimizer is believed",
        says="one that writes past torch's count is taken for one that wrote nothing",
        law="L54",
        test=test_interrupted.test_a_step_that_raises_leaves_a_state_or_none,
        place=watch._is_torchs,
        old="known and",
        new="True and",
    ),
    Mutant(
        name="lists are believed",
        says="a kernel on lists of tensors is taken for one that wrote nothing",
        law="L54",
        test=test_interrupted.test_a_step_that_raises_leaves_a_state_or_none,
        place=watch._goes_by_lists,
        old="return True",
        new="return False",
    ),
    Mutant(
        name="what was seen an update ago",
        says="an update is compared with the tensors as they were before another",
        law="L54",
        test=test_interrupted.test_a_step_that_raises_leaves_a_state_or_none,
        place=live_optimizer.LiveOptimizer._begin,
        old="self._watch.begin()",
        new="self._watch._count < 0 and self._watch.begin()",
    ),
]
