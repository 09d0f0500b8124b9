# SPDX-License-Identifier: Apache-2.0
"""Bugs in telling whether an update that raised had changed anything, and in Ctrl-C."""

from accelfn.definition.cache import Cache
from accelfn.engine.optimizer import live_optimizer, versions
from accelfn.step import stages
from tests.laws import test_interrupted
from tests.mutants.mutant import Mutant
from tests.unit import test_interrupts, test_step

MUTANTS = [
    Mutant(
        "L54: an optimizer that raised before it changed anything costs the state",
        test_interrupted.test_a_step_that_raises_leaves_a_state_or_none,
        stages._undo,
        "state.lease.restore() → pass",
    ),
    Mutant(
        "L54: nobody looks what an optimizer had changed when it raised",
        test_interrupted.test_a_step_that_raises_leaves_a_state_or_none,
        versions.Versions.is_untouched,
        "self._count != sum(map(_version, self._tensors)) → False",
    ),
    Mutant(
        "L54: one that writes past torch's count is taken for one that wrote nothing",
        test_interrupted.test_a_step_that_raises_leaves_a_state_or_none,
        versions._is_known,
        "is_torchs(optimizer) and → True and",
    ),
    Mutant(
        "L54: a kernel on lists of tensors is taken for one that wrote nothing",
        test_interrupted.test_a_step_that_raises_leaves_a_state_or_none,
        versions._goes_by_lists,
        "return True → return False",
    ),
    Mutant(
        "L54: an update is compared with the tensors as they were before another",
        test_interrupted.test_a_step_that_raises_leaves_a_state_or_none,
        live_optimizer.LiveOptimizer._begin,
        "self._versions.begin() → self._versions._count < 0 and self._versions.begin()",
    ),
    Mutant(
        "a step function that the garbage collector lets go of may swallow a Ctrl-C",
        test_interrupts.test_no_python_runs_when_a_training_is_let_go_of,
        Cache.compose,
        "self.composed.pop → lambda gone: self.composed.pop(gone)",
        args={"setup": "plain"},
    ),
    Mutant(
        "a state keeps what its setup made of functions that are gone",
        test_step.test_a_step_that_nobody_holds_is_forgotten,
        Cache.compose,
        "ref(function, self.composed.pop) → ref(function)",
        args={"setup": "plain"},
    ),
]
