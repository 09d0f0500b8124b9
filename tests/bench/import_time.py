# SPDX-License-Identifier: Apache-2.0
"""What importing accelfn adds to importing torch."""

import operator
import os
import subprocess
import sys
from functools import partial

from figures import Figure
from rounds import compared, timed

# an installed package has its bytecode; an editable one may be told not to keep it
INSTALLED = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
# torch leaves a collection of all its objects due, which comes a little sooner or later
COLLECTS_NOTHING = "import gc; gc.disable(); "
STATEMENTS = ("import torch", "import torch, accelfn")


def measure(rounds: int) -> list[Figure]:
    """Return what a process costs from start to end, and the difference."""
    starts = {statement: partial(start, statement) for statement in STATEMENTS}
    return compared(timed(starts, rounds=rounds, steps=1), how=operator.sub)


def start(statement: str, times: int) -> None:
    """Run Python with that statement and nothing else."""
    for _ in range(times):
        subprocess.run(
            [sys.executable, "-c", COLLECTS_NOTHING + statement],
            check=True,
            env=INSTALLED,
        )
