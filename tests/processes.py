# SPDX-License-Identifier: Apache-2.0
"""`run_ranks`: run a test's function on real Gloo ranks, with the time limit of the tests."""

from functools import partial

from accelfn.testing import RankError, run_processes
from tests.waiting import HANGS

__all__ = ["RankError", "run_ranks"]

run_ranks = partial(run_processes, timeout=HANGS)
