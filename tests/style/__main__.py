# SPDX-License-Identifier: Apache-2.0
"""Check language, names, code size and commit subjects: `python -m tests.style`, without torch."""

import re
import subprocess
import sys

from tests.style.bounds import ROOT, bounds, measure_texts

SUBJECT = re.compile(r"(?=.{,72}$)[a-z0-9_./-]+: [a-z]")
NEWEST = 100
"""Number of commits to check."""
_LISTED = {
    "bare": " `python -m tests.style.names FILE` lists them.",
    "hard": " `python -m tests.style.prose FILE` lists them.",
}


def find_faults() -> list[str]:
    """Return messages about measures above their bounds, and about invalid commit subjects."""
    most = bounds()
    faults = [
        f"tests/style/bounds.txt: {name}: {value}, and at most {most[name]} are allowed."
        f"{_LISTED.get(name.split()[0], '')} Remove as much as you add; for a new feature, write"
        " the measured number into this file."
        for name, value in measure_texts().items()
        if value > most[name]
    ]
    command = "git", "-C", str(ROOT), "log", f"-{NEWEST}", "--no-merges", "--format=%s"
    log = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return faults + [
        f"commit {subject!r}: expected area: verb object, of at most 72 characters"
        for subject in log.splitlines()
        if not SUBJECT.match(subject)
    ]


if __name__ == "__main__":
    sys.exit("\n".join(find_faults()) or None)
