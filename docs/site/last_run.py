# SPDX-License-Identifier: Apache-2.0
"""The foot of a page: when CI ran its Python code.

CI runs every Python block of a page, and a commit lands only if all blocks pass. So the foot
names the commit of the page, and the versions of Python and torch in docs/compatibility.md.
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
    """Return the foot of a page of Markdown."""
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
    """Return the commit of the pages, or nothing in an sdist."""
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
