# SPDX-License-Identifier: Apache-2.0
"""Plant every mutant, and print whether its test found it and after how many examples.

Arguments are names of test files, as `test_diloco`: their mutants alone. A hunt of all that finds
all writes the numbers of examples into the table.
"""

import sys
import time
import warnings

import attrs
import torch
from rich.console import Console

import accelfn as af
from tests.mutants import profile


def main() -> int:
    """Return how many mutants survived."""
    profile.load()
    from tests.mutants.hunt import hunt
    from tests.mutants.table import read_table, write_table

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=af.Warning)
    console = Console(highlight=False)
    start, outcomes = time.perf_counter(), []
    words = sys.argv[1:]
    mutants = read_table()
    homes = [mutant.module.rpartition(".")[2] for mutant in mutants]
    unknown = [word for word in words if word not in homes]
    if unknown:
        console.print(f"{unknown[0]} finds no mutant: expected words as test_diloco")
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


if __name__ == "__main__":
    sys.exit(main())
