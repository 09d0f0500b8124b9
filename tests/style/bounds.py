# SPDX-License-Identifier: Apache-2.0
"""Measure code size and plain language; `python -m tests.style.bounds` lowers the bounds."""

import ast
import io
import subprocess
import sys
import tokenize
from functools import cache
from pathlib import Path

from tests.style import names, prose

ROOT = Path(__file__).parents[2]
FILE = Path(__file__).with_name("bounds.txt")
SATELLITES = (
    "testing",
    "launching",
    "track",
    "deepspeed",
    "weights",
    "megatron",
    "model_parallel",
)


def measure_texts() -> dict[str, int]:
    """Return the measures of the files that git tracks, by name; this does not import torch."""
    package, tests = tracked("accelfn"), tracked("tests")
    kernel = [path for path in package if path.parts[1] not in SATELLITES]
    bench = Path("tests", "bench")
    pages = [*tracked("docs", ".md"), Path("README.md")]
    return {
        "files of the package, without __init__.py": sum(
            path.name != "__init__.py" for path in package
        ),
        "lines of code, kernel": sum(map(lines_of_code, kernel)),
        "lines of code, package": sum(map(lines_of_code, package)),
        "lines of the tests, without bench": sum(
            (ROOT / path).read_text().count("\n")
            for path in tests
            if bench not in path.parents
        ),
        "bare names of functions": sum(
            len(names.bare_functions(ROOT / p)) for p in package
        ),
        "bare names of variables": sum(
            len(names.bare_variables(ROOT / p)) for p in package
        ),
        "hard phrases, package": sum(len(prose.findings(ROOT / p)) for p in package),
        "hard phrases, pages": sum(len(prose.findings(ROOT / p)) for p in pages),
    }


def measure_step() -> dict[str, int]:
    """Return how many files and functions of accelfn a step enters, and moves between files.

    The step runs in a new process, because objects of earlier tests may call more functions.
    """
    output = subprocess.run(
        [sys.executable, "-m", "tests.style.step"],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    ).stdout
    names = (
        "files that a steady step enters",
        "functions that a steady step enters",
        "moves between files in a steady step",
    )
    return dict(zip(names, map(int, output.split()[-3:]), strict=True))


def tracked(folder: str, ends: str = ".py") -> list[Path]:
    """Return the files of a folder that git tracks and that exist."""
    asks = ("git", "-C", str(ROOT), "ls-files", "--", folder)
    listed = subprocess.run(asks, capture_output=True, text=True, check=True).stdout
    paths = [Path(line) for line in listed.splitlines() if line.endswith(ends)]
    return [path for path in paths if (ROOT / path).exists()]


@cache
def lines_of_code(path: Path) -> int:
    """Return the number of lines of a file, without comments, docstrings and empty lines."""
    source = (ROOT / path).read_text()
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.ENDMARKER}
    skipped |= {tokenize.INDENT, tokenize.DEDENT}
    lines = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in skipped:
            lines.update(range(token.start[0], token.end[0] + 1))
    kinds = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, kinds) and ast.get_docstring(node) is not None:
            text = node.body[0]
            lines -= {*range(text.lineno, (text.end_lineno or text.lineno) + 1)}
    return len(lines)


def bounds() -> dict[str, int]:
    """Read the bound of each measure, by name."""
    rows = (line.rpartition(": ") for line in FILE.read_text().splitlines())
    return {name: int(bound) for name, _, bound in rows}


def with_room(name: str, value: int) -> int:
    """Return the bound for a measured value; line counts are rounded up to a hundred."""
    return -(-value // 100) * 100 if name.startswith("lines") else value


if __name__ == "__main__":
    lowest = bounds() if FILE.exists() else {}
    found = {
        name: min(with_room(name, value), lowest.get(name, value))
        for name, value in {**measure_texts(), **measure_step()}.items()
    }
    FILE.write_text("".join(f"{name}: {value}\n" for name, value in found.items()))
    sys.stdout.write(FILE.read_text())
