# SPDX-License-Identifier: Apache-2.0
"""Bugs in how compiled losses and recomputed activations run."""

from accelfn.engine.module import graph_runner
from accelfn.transforms import activations
from tests.laws import test_buffers, test_compiling
from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "L4: gradients of a compiled loss are not added to those of micro-batches before",
        test_compiling.test_compiling_changes_nothing,
        graph_runner.OneGraphRunner.backward,
        "lists.add_(sums, addends, alpha=1) → del sums, addends",
    ),
    Mutant(
        "L4: gradients of a compiled mean are not multiplied by its weight",
        test_compiling.test_compiling_changes_nothing,
        graph_runner.OneGraphRunner.backward,
        "if scale is not None: → if False:",
    ),
    Mutant(
        "L4: what is run again writes its running statistics again",
        test_compiling.test_recomputing_is_exact,
        activations._guarded,
        "else runs[0].as_before() → else runs[0].watched()",
    ),
    Mutant(
        "L4: where a second run ends before it writes a buffer, what the first wrote is lost",
        test_buffers.test_what_runs_again_writes_buffers_once,
        activations._Buffers.as_before,
        "finally: → except ValueError:\n        raise\n    else:",
    ),
    Mutant(
        "L4: a second run begins with the buffers that the first left",
        test_buffers.test_what_runs_again_writes_buffers_once,
        activations._Buffers.as_before,
        "table[key] = copy.clone() → pass",
    ),
]
