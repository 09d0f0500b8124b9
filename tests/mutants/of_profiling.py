# SPDX-License-Identifier: Apache-2.0
"""Bugs in what a profile tells of a step."""

from accelfn.base import contexts
from accelfn.engine.engine import Engine
from accelfn.loop import breakdown
from accelfn.state import succession
from tests.laws import test_profiling as laws
from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "L43: what lies in another span counts for both",
        laws.test_all_of_a_step_is_told,
        breakdown.breakdown,
        "microseconds[_part(open_spans[-1].name)] -= length → pass",
    ),
    Mutant(
        "L43: the backward pass counts as accelfn's own time",
        laws.test_all_of_a_step_is_told,
        Engine.value_and_grad,
        'span("accelfn backward") → span("accelfn step")',
    ),
    Mutant(
        "L43: the time in which data are read is nobody's",
        laws.test_all_of_a_step_is_told,
        contexts.is_plain,
        "and not profiler._is_profiler_enabled → and True",
    ),
    Mutant(
        "L43: transforms that see the state after an update leave no span",
        laws.test_all_of_a_step_is_told,
        succession.through_state,
        'span("accelfn", field, owner.name) → span("of a transform")',
    ),
]
