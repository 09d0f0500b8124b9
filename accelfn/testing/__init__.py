# SPDX-License-Identifier: Apache-2.0
"""Simulated worlds and the laws of training, for the tests of those who train."""

from accelfn.testing.exchange import Entry
from accelfn.testing.faults import Corrupt, Crash, Leave, Raise, Stall, Terminate
from accelfn.testing.simulation import Run, simulate

__all__ = [
    "Corrupt",
    "Crash",
    "Entry",
    "Leave",
    "Raise",
    "Run",
    "Stall",
    "Terminate",
    "simulate",
]
