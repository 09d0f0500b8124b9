# SPDX-License-Identifier: Apache-2.0
"""Real Gloo ranks for tests, by the name that the tests know them by."""

from accelfn.testing.processes.run import RankError
from accelfn.testing.processes.run import run_processes as run_ranks

__all__ = ["RankError", "run_ranks"]
