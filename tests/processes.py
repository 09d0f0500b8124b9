# SPDX-License-Identifier: Apache-2.0
"""Real Gloo ranks for tests, by the name that the tests know them by."""

from functools import partial

from accelfn.testing import RankError, run_processes
from tests.waiting import HANGS

__all__ = ["RankError", "run_ranks"]

run_ranks = partial(run_processes, timeout=HANGS)
