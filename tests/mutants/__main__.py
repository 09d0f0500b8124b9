# SPDX-License-Identifier: Apache-2.0
"""Plant every mutant, print what became of it, and write docs/mutants.md.

Words are names of test files, as `test_diloco`: their mutants alone, and no page.
"""

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
    words = sys.argv[1:]
    homes = [mutant.test.__module__.rpartition(".")[2] for mutant in MUTANTS]
    unknown = [word for word in words if word not in homes]
    if unknown:
        console.print(f"{unknown[0]} finds no mutant: expected words as test_diloco")
        return 1
    for mutant, home in zip(MUTANTS, homes, strict=True):
        if words and home not in words:
            continue
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
    elif not words:
        PAGE.write_text(page(outcomes))
    return len(survived)


if __name__ == "__main__":
    sys.exit(main())
