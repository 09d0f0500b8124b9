# SPDX-License-Identifier: Apache-2.0
"""Simulated worlds and the laws of training, for the tests of those who train."""

from accelfn.errors import (
    CollectiveMismatchError,
    DeadlockError,
    DefaultGroupError,
    LawError,
    RankCrashedError,
    SimulationError,
)
from accelfn.testing.bundle import crash_bundles, replay
from accelfn.testing.checking.equivalence import assert_equivalent
from accelfn.testing.checking.problems import Problem
from accelfn.testing.checking.step_laws import check_resume, check_step
from accelfn.testing.checking.transform_laws import check_transform
from accelfn.testing.comparing.loops import Agreement, compare_loops, quantities
from accelfn.testing.comparing.snapshot import assert_collectives
from accelfn.testing.comparing.states import assert_states_equal
from accelfn.testing.processes.run import RankError, run_processes
from accelfn.testing.simulate import simulate
from accelfn.testing.simulation.entries import Entry
from accelfn.testing.simulation.faults import (
    Corrupt,
    Crash,
    Fault,
    Leave,
    Raise,
    RankFaultError,
    Stall,
    Terminate,
)
from accelfn.testing.simulation.plan import Run
from accelfn.testing.traffic.link import Link
from accelfn.testing.traffic.traffic import Traffic, communication

__all__ = [
    "Agreement",
    "CollectiveMismatchError",
    "Corrupt",
    "Crash",
    "DeadlockError",
    "DefaultGroupError",
    "Entry",
    "Fault",
    "LawError",
    "Leave",
    "Link",
    "Problem",
    "Raise",
    "RankCrashedError",
    "RankError",
    "RankFaultError",
    "Run",
    "SimulationError",
    "Stall",
    "Terminate",
    "Traffic",
    "assert_collectives",
    "assert_equivalent",
    "assert_states_equal",
    "check_resume",
    "check_step",
    "check_transform",
    "communication",
    "compare_loops",
    "crash_bundles",
    "quantities",
    "replay",
    "run_processes",
    "simulate",
]
