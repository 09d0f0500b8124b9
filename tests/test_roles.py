# SPDX-License-Identifier: Apache-2.0
"""Test that code reads `world.rank` only through a role, such as `world.batch.rank`."""

import ast
from pathlib import Path

import pytest

import accelfn

ROOT = Path(accelfn.__file__).parent
BELOW = ("world", "collectives", "checkpoint", "launching", "testing")
"""Folders that may read `world.rank`: they create worlds, or work on all ranks of a world."""
GIVEN = {
    "loop/control.py": "prints, logs, waits and runs on the ranks that the caller names",
    "loop/profiling.py": "a file for each rank of the caller's world",
    "loop/memory.py": "the ranks of the caller's world find one batch size together",
    "loop/evaluate.py": "gives parts to the ranks that the caller names",
    "data/consistency.py": "all ranks that take samples hold the same data",
    "data/loaders.py": "errors name the rank of the state's world",
    "state/state.py": "compares what the ranks of the caller's world hold",
    "engine/runner.py": "an order of calls is that of one group of ranks",
    "track/throughput.py": "counts the devices of the state's world",
    "engine/doctor.py": "all ranks of the state's world build an engine together",
}
"""Files that may read `world.rank`, each with the reason."""
WORDS = ("rank", "size", "group")


def asked(path: Path) -> list[int]:
    """Return the lines in which a world is asked as it is."""
    lines: list[int] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and node.attr in WORDS:
            owner = node.value
            name = getattr(owner, "id", None) or getattr(owner, "attr", None)
            if name in ("world", "_world"):
                lines.append(node.lineno)
    return lines


FILES = [
    path.relative_to(ROOT).as_posix()
    for path in sorted(ROOT.rglob("*.py"))
    if path.relative_to(ROOT).parts[0] not in BELOW
]


@pytest.mark.parametrize("name", FILES)
def test_a_world_is_asked_by_role(name):
    """`world.batch`, `world.loss` or an axis; the world as it is only where that is meant."""
    assert bool(asked(ROOT / name)) is (name in GIVEN), asked(ROOT / name)
