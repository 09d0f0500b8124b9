# SPDX-License-Identifier: Apache-2.0
"""Simulated worlds, laws for property tests, and comparisons, for your tests."""

from accelfn.plug import arguments as _arguments

for _module in ("cloudpickle", "pytest"):
    _arguments.package(
        _module, call="accelfn.testing", extra="testing", error=ImportError
    )

from accelfn.errors import (
    DeadlockError,
    DefaultGroupError,
    LawError,
    RankCrashedError,
    SimulationError,
)
from accelfn.testing.comparing import assert_collectives, assert_states_equal
from accelfn.testing.equivalence import assert_equivalent
from accelfn.testing.laws import Problem
from accelfn.testing.loops import Agreement, compare_loops, quantities
from accelfn.testing.plugin import crash_bundles, replay
from accelfn.testing.processes import RankError, run_processes
from accelfn.testing.simulate import simulate
from accelfn.testing.simulation.calls import (
    Corrupt,
    Crash,
    Entry,
    Fault,
    Leave,
    Raise,
    RankFaultError,
    Stall,
    Terminate,
)
from accelfn.testing.simulation.plan import Run
from accelfn.testing.step_laws import check_resume, check_step
from accelfn.testing.traffic import Link, Traffic, communication
from accelfn.testing.transform_laws import check_transform

__all__ = [
    "Agreement",
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
