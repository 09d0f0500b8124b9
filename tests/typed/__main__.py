# SPDX-License-Identifier: Apache-2.0
"""Demand that mypy and pyright report the lines with a typo, and no others."""

import re
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
FILES = [FOLDER / "program.py", FOLDER / "typos.py"]
CHECKERS = {
    "mypy": ["mypy", "--strict", "--follow-imports=silent"],
    "pyright": ["pyright"],
}
ERROR = re.compile(r"^\s*(?:\S*/)?(\w+\.py):(\d+)(?::\d+)?(?: -|:) error", re.MULTILINE)

expected = {
    (path.name, str(number))
    for path in FILES
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
    if line.endswith("# typo")
}
problems: list[str] = []
for name, command in CHECKERS.items():
    output = subprocess.run(
        [*command, *map(str, FILES)], capture_output=True, text=True, check=False
    ).stdout
    reported = {match.groups() for match in ERROR.finditer(output)}
    if reported != expected:
        problems += [
            output,
            f"{name} misses typos at {sorted(expected - reported)}",
            f"{name} reports other lines: {sorted(reported - expected)}",
        ]
if problems:
    sys.exit("\n".join(problems))
