# SPDX-License-Identifier: Apache-2.0
"""Bugs in what a profile tells of a step."""

from accelfn.base import contexts
from accelfn.engine.engine import Engine
from accelfn.state import succession
from tests.laws import test_profiling as laws
from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "L43: the backward pass leaves no span of its own",
        laws.test_each_part_of_a_step_has_a_span,
        Engine.value_and_grad,
        'span("accelfn backward") → span("accelfn step")',
    ),
    Mutant(
        "L43: reading data leaves no span",
        laws.test_each_part_of_a_step_has_a_span,
        contexts.is_plain,
        "and not profiler._is_profiler_enabled → and True",
    ),
    Mutant(
        "L43: transforms that see the state after an update leave no span",
        laws.test_each_part_of_a_step_has_a_span,
        succession.through_state,
        'span("accelfn", field, owner.name) → span("of a transform")',
    ),
]
