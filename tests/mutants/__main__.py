# SPDX-License-Identifier: Apache-2.0
"""Insert every mutant; print whether its test found the bug, and after how many examples.

Pass names of test files, such as `test_diloco`, to run only their mutants. If all mutants ran and
were found, their numbers of examples are written into the table. `--random 100 --seed 1 engine`
inserts 100 random bugs into a folder of the package instead. `--file BUGS` inserts the bugs of a
file; see `search`.
"""

import argparse
import sys
import time
import warnings
from pathlib import Path

import attrs
import torch
from rich.console import Console

import accelfn as af
from tests.mutants import profile


def main() -> int:
    """Run the command line; return how many mutants no test found."""
    profile.load()
    from tests.mutants.hunt import hunt
    from tests.mutants.table import read_table, write_table

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=af.errors.AccelfnWarning)
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("--random", type=int, default=0, metavar="COUNT")
    parser.add_argument("--file", type=Path, metavar="BUGS")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("words", nargs="*")
    asked = parser.parse_args()
    console = Console(highlight=False)
    start, outcomes = time.perf_counter(), []
    words = asked.words
    if asked.random or asked.file:
        return _search(console, asked)
    mutants = read_table()
    homes = [mutant.module.rpartition(".")[2] for mutant in mutants]
    unknown = [word for word in words if word not in homes]
    if unknown:
        console.print(f"{unknown[0]}: expected a test file, such as test_diloco")
        return 1
    for mutant, home in zip(mutants, homes, strict=True):
        if words and home not in words:
            continue
        outcome = hunt(mutant)
        outcomes.append(outcome)
        color = "green" if outcome.killed else "bold red"
        console.print(
            f"[{color}]{'killed' if outcome.killed else 'SURVIVED':8}[/]"
            f" {outcome.examples:3} examples {outcome.seconds:5.1f} s  {mutant.law:4}"
            f" {mutant.says}  [dim]{outcome.told}[/]",
            soft_wrap=True,
        )
    survived = [each.mutant.says for each in outcomes if not each.killed]
    seconds = time.perf_counter() - start
    console.print(
        f"{len(outcomes) - len(survived)} of {len(outcomes)} killed in {seconds:.0f} s"
    )
    if survived:
        console.print(f"Survived: {'; '.join(survived)}. Strengthen their tests.")
    elif not words:
        write_table(
            attrs.evolve(each.mutant, examples=str(each.examples)) for each in outcomes
        )
    return len(survived)


def _search(console: Console, asked: argparse.Namespace) -> int:
    """Run the tests on random bugs, or on those of a file; return how many were not found."""
    from tests.mutants.search import draw_bugs, read_bugs, search

    folder = asked.words[0] if asked.words else ""
    drawn = asked.file is None
    bugs = (
        draw_bugs(asked.random, asked.seed, folder) if drawn else read_bugs(asked.file)
    )
    survived = 0
    for bug, test in search(bugs):
        survived += not test
        said = f"[green]found by {test}[/]" if test else "[bold red]SURVIVED[/]"
        console.print(f"{said} {bug.place} ", end="")
        console.print(f"{bug.change} {bug.says}", markup=False, soft_wrap=True)
    console.print(f"{len(bugs) - survived} of {len(bugs)} found")
    return survived


if __name__ == "__main__":
    sys.exit(main())
