# SPDX-License-Identifier: Apache-2.0
"""How large the project is, and how plain; `python -m tests.style.bounds` lowers the bounds."""

import ast
import gc
import io
import subprocess
import sys
import tokenize
from functools import cache, partial
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

import accelfn as af
from tests.style import names, prose

ROOT = Path(__file__).parents[2]
FILE = Path(__file__).with_name("bounds.txt")
SATELLITES = (
    "testing",
    "launching",
    "track",
    "interop",
    "deepspeed",
    "placing",
    "megatron",
)


def measures() -> dict[str, int]:
    """Return all figures by name, of the files that git knows."""
    package, tests = tracked("accelfn"), tracked("tests")
    kernel = [path for path in package if path.parts[1] not in SATELLITES]
    bench = Path("tests", "bench")
    pages = [*tracked("docs", ".md"), Path("README.md")]
    # in a process of its own: what other tests left behind may call more
    asks = (
        "from tests.style.bounds import entered_by_a_step; print(*entered_by_a_step())"
    )
    command = [sys.executable, "-c", asks]
    output = subprocess.run(
        command, capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout
    files, functions = map(int, output.split()[-2:])
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
        "files that a steady step enters": files,
        "functions that a steady step enters": functions,
        "bare names of functions": sum(
            len(names.bare_functions(ROOT / p)) for p in package
        ),
        "bare names of variables": sum(
            len(names.bare_variables(ROOT / p)) for p in package
        ),
        "hard phrases, package": sum(len(prose.findings(ROOT / p)) for p in package),
        "hard phrases, pages": sum(len(prose.findings(ROOT / p)) for p in pages),
    }


def tracked(folder: str, ends: str = ".py") -> list[Path]:
    """Return the files of a folder that git knows and the checkout has."""
    asks = ("git", "-C", str(ROOT), "ls-files", "--", folder)
    listed = subprocess.run(asks, capture_output=True, text=True, check=True).stdout
    paths = [Path(line) for line in listed.splitlines() if line.endswith(ends)]
    return [path for path in paths if (ROOT / path).exists()]


@cache
def lines_of_code(path: Path) -> int:
    """Return the lines of a source without comments, docstrings and empty ones."""
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


def entered_by_a_step() -> tuple[int, int]:
    """Return how many files and functions of accelfn a steady step of the front page enters."""
    inputs, targets = torch.randn(320, 8), torch.randint(0, 3, (320,))
    state = af.TrainState.create(
        model=lambda: torch.nn.Linear(8, 3),
        optimizer=partial(torch.optim.AdamW, lr=0.01),
        data=af.Data((inputs, targets), global_batch_size=16, shuffle=True),
        setup=af.chain(
            *(af.shard_data(), af.wrap_ddp(), af.autocast("bf16")),
            *(af.accumulate(num_micro_batches=2), af.clip_grad_norm(1.0)),
        ),
        seed=0,
    )
    step = af.make_step(lambda model, batch: cross_entropy(model(batch[0]), batch[1]))
    batches = iter(af.batches(state))
    for _ in range(6):
        state, _ = step(state, next(batches))
    codes, batch = set(), next(batches)
    package = str(Path(af.__file__).parent)
    before = sys.getprofile()
    gc.collect()  # here, for what it frees may call functions of accelfn
    sys.setprofile(lambda frame, *_: codes.add(frame.f_code))
    try:
        step(state, batch)
    finally:
        sys.setprofile(before)
    own = [code for code in codes if code.co_filename.startswith(package)]
    return len({code.co_filename for code in own}), len(own)


def bounds() -> dict[str, int]:
    """Return the bounds by the same names."""
    rows = (line.rpartition(": ") for line in FILE.read_text().splitlines())
    return {name: int(bound) for name, _, bound in rows}


def with_room(name: str, value: int) -> int:
    """Return a bound: lines have room up to the next hundred, for a small addition."""
    return -(-value // 100) * 100 if name.startswith("lines") else value


if __name__ == "__main__":
    lowest = bounds() if FILE.exists() else {}
    found = {
        name: min(with_room(name, value), lowest.get(name, value))
        for name, value in measures().items()
    }
    FILE.write_text("".join(f"{name}: {value}\n" for name, value in found.items()))
    sys.stdout.write(FILE.read_text())
