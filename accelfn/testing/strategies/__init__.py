# SPDX-License-Identifier: Apache-2.0
"""Hypothesis strategies: what property tests of training are drawn from.

Everything is drawn before a world starts, in the test's own thread. What is drawn is a
value that prints as the code that makes it; it shrinks to the smallest that still fails.

    @given(program=programs(), size=worlds(), schedule=schedules(), order=sums())
    def test_replicas_agree(program, size, schedule, order):
        run = simulate(size, program, schedule=schedule, sums=order)
        ...
"""

from accelfn.testing.strategies.chains import chains
from accelfn.testing.strategies.datasets import Samples, datasets
from accelfn.testing.strategies.losses import Criterion, losses
from accelfn.testing.strategies.nets import Net, models
from accelfn.testing.strategies.optimizers import TorchOptimizer, optimizers
from accelfn.testing.strategies.programs import Program, programs
from accelfn.testing.strategies.ranks import faults, schedules, sums, worlds

__all__ = [
    "Criterion",
    "Net",
    "Program",
    "Samples",
    "TorchOptimizer",
    "chains",
    "datasets",
    "faults",
    "losses",
    "models",
    "optimizers",
    "programs",
    "schedules",
    "sums",
    "worlds",
]
