# SPDX-License-Identifier: Apache-2.0
"""Plant every mutant, print what became of it, and write docs/mutants.md."""

import sys
import time
import warnings

import torch
from rich.console import Console

import accelfn as af
from tests.mutants import profile


def main() -> int:
    """Return how many mutants survived."""
    profile.load()
    from tests.mutants.hunt import hunt
    from tests.mutants.mutants import MUTANTS
    from tests.mutants.page import PAGE, page

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=af.Warning)
    console = Console(highlight=False)
    start, outcomes = time.perf_counter(), []
    for mutant in MUTANTS:
        outcome = hunt(mutant)
        outcomes.append(outcome)
        color = "green" if outcome.killed else "bold red"
        console.print(
            f"[{color}]{'killed' if outcome.killed else 'SURVIVED':8}[/]"
            f" {outcome.examples:3} examples {outcome.seconds:5.1f} s  {mutant.law or '':4}"
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
    else:
        PAGE.write_text(page(outcomes))
    return len(survived)


if __name__ == "__main__":
    sys.exit(main())
