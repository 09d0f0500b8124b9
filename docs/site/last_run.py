# SPDX-License-Identifier: Apache-2.0
"""When the code of a page was run: the foot of each page, which no person writes.

CI runs every Python block of a page, and no commit lands for which one fails. So the commit
that a page is built from says when its code was last seen to run, and what docs/compatibility.md
and constraints.txt say of CI is what it ran on.
"""

import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
RUNS = re.compile(r"^```(python|pycon)$", re.MULTILINE)
BY_CI = re.compile(r"^\| (\S+) \| (\S+) \| every change \|", re.MULTILINE)
FOOT = '\n<p class="last-run" data-search-exclude>{}</p>\n'


def foot(text: str, version: str) -> str:
    """Return what stands at the foot of a page of Markdown."""
    if RUNS.search(text):
        python, torch = ci()
        said = f"CI ran the Python of this page on Python {python} and torch {torch}"
    else:
        said = "This page has no Python that is run"
    return FOOT.format(f"{said}: accelfn {version}{commit()}.")


@cache
def ci() -> tuple[str, str]:
    """Return the versions of Python and torch that CI runs with every change."""
    found = BY_CI.search((ROOT / "docs/compatibility.md").read_text())
    if not found:
        msg = (
            "docs/compatibility.md has no row 'every change', which says what CI runs."
        )
        raise SystemExit(msg)
    return found[1], found[2]


@cache
def commit() -> str:
    """Return which commit the pages are of, where that can be known.

    An sdist is of none; its version is all that it says.
    """
    if not (ROOT / ".git").exists() or not shutil.which("git"):
        return ""
    changed = ", and changes that CI has not seen" if _git("status", "--short") else ""
    return f", commit of {_git('log', '-1', '--format=%cs (%h)')}{changed}"


def _git(*words: str) -> str:
    done = subprocess.run(  # noqa: S603 - git, of this repository
        ["git", *words],  # noqa: S607 - wherever it is installed
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()
