# SPDX-License-Identifier: Apache-2.0
"""Benchmark of the time that importing accelfn adds to importing torch."""

import operator
import os
import subprocess
import sys
from functools import partial

from figures import Figure
from rounds import compared, timed

# Let Python write bytecode, as for an installed package.
INSTALLED = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
# After the import of torch, a full garbage collection is due at a random time.
COLLECTS_NOTHING = "import gc; gc.disable(); "
STATEMENTS = ("import torch", "import torch, accelfn")


def measure(rounds: int) -> list[Figure]:
    """Measure the time of each process from start to end, and the difference."""
    starts = {statement: partial(start, statement) for statement in STATEMENTS}
    return compared(timed(starts, rounds=rounds, steps=1), how=operator.sub)


def start(statement: str, times: int) -> None:
    """Run Python processes that execute only this statement."""
    for _ in range(times):
        subprocess.run(
            [sys.executable, "-c", COLLECTS_NOTHING + statement],
            check=True,
            env=INSTALLED,
        )
