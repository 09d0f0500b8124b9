# SPDX-License-Identifier: Apache-2.0
"""Bugs in how compiled losses and recomputed activations run."""

from accelfn.engine.module import graph_runner
from accelfn.transforms import activations
from tests.laws import test_compiling
from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        name="one graph, one micro-batch",
        says="gradients of a compiled loss are not added to those of micro-batches before",
        law="L4",
        test=test_compiling.test_compiling_changes_nothing,
        place=graph_runner.OneGraphRunner.backward,
        old="lists.add_(sums, addends, alpha=1)",
        new="del sums, addends",
    ),
    Mutant(
        name="a compiled mean is a total",
        says="gradients of a compiled mean are not multiplied by its weight",
        law="L4",
        test=test_compiling.test_compiling_changes_nothing,
        place=graph_runner.OneGraphRunner.backward,
        old="if scale is not None:",
        new="if False:",
    ),
    Mutant(
        name="statistics twice",
        says="what is run again writes its running statistics again",
        law="L4",
        test=test_compiling.test_recomputing_is_exact,
        place=activations._guarded,
        old="else runs[0].as_before()",
        new="else runs[0].watched()",
    ),
]
