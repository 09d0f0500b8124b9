# SPDX-License-Identifier: Apache-2.0
"""Train one task by hand, with Accelerate, Fabric and accelfn, side by side: `compare.py`.

Each program is a script of its own, on 1 and on 2 processes under torchrun. The table is
printed, and with --write put into README.md. Times and memory are those of one machine.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
README = HERE.parents[1] / "README.md"
MARKS = "<!-- nox -s compare -->\n", "<!-- end -->\n"
PROGRAMS = {
    "by hand": "plain.py",
    "Accelerate": "by_accelerate.py",
    "Fabric": "by_fabric.py",
    "accelfn": "by_accelfn.py",
}
LAST = 17  # updates of an epoch, the last of which has 97 samples
SHOWN = 1, LAST, 2 * LAST


def trained(program: str, size: int) -> dict[str, Any]:
    """Run a program on so many processes, and return what they saw together."""
    torchrun = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={size}",
    ]
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, *(torchrun if size > 1 else []), HERE / program, folder],
            check=True,
            capture_output=True,
            timeout=300,
            env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        )
        ranks = [json.loads(Path(folder, f"{i}.json").read_text()) for i in range(size)]
    counts = [sum(each) for each in zip(*(r["samples"] for r in ranks), strict=True)]
    seen = zip(
        *(r["losses"] for r in ranks), *(r["samples"] for r in ranks), strict=True
    )
    totals = [
        sum(loss * n for loss, n in zip(row[:size], row[size:], strict=True))
        / sum(row[size:])
        for row in seen
    ]
    return {**ranks[0], "losses": totals, "samples": counts}


def lines_of(program: str) -> int:
    """Return how many lines a program has, from `# begin` to `# end`, without blank ones."""
    _, _, text = (HERE / program).read_text().partition("# begin\n")
    return sum(bool(line.strip()) for line in text.partition("# end\n")[0].splitlines())


def rows(programs: Iterable[str] = PROGRAMS) -> list[list[str]]:
    """Return the table: what is compared, and what each program gave."""
    found = {
        (name, size): trained(PROGRAMS[name], size)
        for size in (1, 2)
        for name in programs
    }
    table = [
        ["", *programs],
        ["lines", *(str(lines_of(PROGRAMS[n])) for n in programs)],
    ]
    for size in (1, 2):
        run = [found[name, size] for name in programs]
        on = f"{size} process{'es' if size > 1 else ''}"
        for update in SHOWN:
            losses = (f"{each['losses'][update - 1]:.6f}" for each in run)
            table.append([f"{on}: loss of update {update}", *losses])
        table.append([f"{on}: held-out loss", *(f"{r['held_out']:.6f}" for r in run)])
        table.append([f"{on}: ms per step", *(f"{r['ms']:.2f}" for r in run)])
        table.append([f"{on}: peak memory, MiB", *(f"{r['mib']:.0f}" for r in run)])
    table.append(
        ["samples for the last 97, on 2", *(last(found[n, 2]) for n in programs)]
    )
    return table


def last(run: dict[str, Any]) -> str:
    """Say what became of 97 samples on two processes."""
    seen = run["samples"][LAST - 1]
    return "97, each once" if seen == 97 else f"{seen}, {seen - 97} of them twice"


def markdown(table: list[list[str]]) -> str:
    """Return a table as Markdown."""
    lines = ["| " + " | ".join(row) + " |" for row in table]
    lines.insert(1, "|" + " --- |" * len(table[0]))
    return "\n".join(lines) + "\n"


def main() -> None:
    """Print the table, and write it if asked to."""
    text = markdown(rows())
    sys.stdout.write(text)
    if "--write" in sys.argv:
        begin, end = MARKS
        between = re.compile(f"{begin}.*{end}", re.DOTALL)
        page = README.read_text(encoding="utf-8")
        README.write_text(
            between.sub(f"{begin}\n{text}\n{end}", page), encoding="utf-8"
        )


if __name__ == "__main__":
    main()
